"""Weights on the Hugging Face hub: download a repository into the hub's cache and check every file.

All libraries share this cache, so nothing is downloaded twice. Large files are not downloaded by `snapshot_download`,
which starts a file anew after a killed process. Here an unfinished file is stored under its expected checksum, the
download resumes where it stopped, and the file moves into place when its checksum is right.

`http_get`, `repo_folder_name` and `WeakFileLock` are names of huggingface_hub that it does not document. With them a
download uses its cache folder and its lock, and resumes a partial file. `tests/weights/hub/test_hub.py` fails if a
version no longer has them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from vitrail.errors import WeightsError
from vitrail.files import names_near, open_regular
from vitrail.weights.archive import SUFFIXES, weight_files

log = logging.getLogger("vitrail")
BESIDE = ("config.json", "open_clip_config.json", "preprocessor_config.json", "card.json", "README.md")
"""Files that are downloaded together with the weights, if a repository has them."""
TIMEOUT = 10.0
"""Seconds to wait for the hub before using the cache."""

LARGEST_HEADER = 1 << 16
"""Maximum number of bytes of a README.md in which its header is looked for."""
_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[^@\s]+))?")


def is_hub_name(source: str | Path) -> bool:
    """Return whether `source` may be a name on the hub, "owner/name" or "owner/name@revision", rather than a path.

    An existing path, or a path in an existing folder, is not a name.
    """
    match = _NAME.fullmatch(str(source))
    if match is None or Path(source).exists() or Path(source).suffix in SUFFIXES:
        return False
    return not Path(match["repository"]).parent.is_dir()


def resolve(name: str) -> Path:
    """Return the folder with the weights of "owner/name" or "owner/name@revision", downloaded if necessary.

    Raises WeightsError if the repository does not exist, is not open or holds no weights, or a file has a wrong
    checksum. Without a network it raises within seconds, and says where the cache is and how to fill it.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    match = _NAME.fullmatch(name)
    if match is None:
        raise _no_name(name)
    repository, revision = match["repository"], match["revision"] or "main"
    if constants.HF_HUB_OFFLINE:
        return _cached(repository, revision, "HF_HUB_OFFLINE keeps vitrail from the network")
    try:
        with _bars():
            return _downloaded(repository, revision)
    except HfHubHTTPError as error:
        told = refusal(repository, revision, error)
        try:
            return _cached(repository, revision, told or f"{constants.ENDPOINT} answers {_first_line(error)}")
        except WeightsError as missing:
            raise (WeightsError(f"{_not_here(repository)} {told}") if told else missing) from error
    except unreachable() as error:
        if _is_local(error):
            raise WeightsError(
                f"{repository} cannot be written to {constants.HF_HUB_CACHE}: {_first_line(error)}; make room, or say "
                "with HF_HOME where the cache should be"
            ) from error
        return _cached(repository, revision, f"{constants.ENDPOINT} cannot be reached ({_first_line(error)})")
    except HFValidationError as error:
        raise WeightsError(f"{name!r} is no name on the hub: {_first_line(error)}") from error
    except ValueError as error:  # a page of some other server, in place of JSON
        return _cached(repository, revision, f"{constants.ENDPOINT} gives no answer of a hub ({_first_line(error)})")


def unreachable() -> tuple[type[BaseException], ...]:
    """Return the exceptions that mean no network: those of httpx (older versions: requests), and OSError."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0], OSError


def refusal(repository: str, revision: str, error: Any) -> str:
    """Return what an HTTP error of the hub means for the user; "" if the hub itself failed."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    log_in = "log in with `hf auth login` or set HF_TOKEN"
    page = f"{constants.ENDPOINT}/{repository}"
    status = getattr(error.response, "status_code", 0)
    if isinstance(error, GatedRepoError):
        return f"{repository} is gated: accept its conditions at {page}, then {log_in}"
    if isinstance(error, RevisionNotFoundError):
        return f"{repository} has no revision {revision!r}: its branches and tags are listed at {page}/tree/main"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is no repository {repository!r} at {constants.ENDPOINT}, or it is private: check the name; if it "
            f"is private, {log_in}"
        )
    if status in (401, 403):
        return f"{constants.ENDPOINT} refuses access to {repository}: {log_in}, with a token that may do this"
    return ""


def _not_here(name: str) -> str:
    """Return that `name` is not a path, with near names, and the beginning of a sentence about it as a hub name."""
    return f"there is no file or folder {name} in {Path.cwd()}.{names_near(Path(name))} As a name on the hub,"


def _no_name(name: str) -> WeightsError:
    if "://" in name:
        url = re.sub(r"^gs://", "https://storage.googleapis.com/", name)
        file = url.rstrip("/").rpartition("/")[2]
        return WeightsError(f"{name} is an address, not a file: download it first (curl -LO '{url}'), then give {file}")
    return WeightsError(f"{name!r} is no name on the hub: those are owner/name, or owner/name@revision")


def _downloaded(repository: str, revision: str) -> Path:
    """Return the snapshot of a repository after downloading and checking its missing files."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.file_download import repo_folder_name

    info = HfApi(library_name="vitrail").model_info(repository, revision=revision, files_metadata=True, timeout=TIMEOUT)
    files = {sibling.rfilename: sibling for sibling in info.siblings or []}
    wanted = [*_weights(files, repository), *(name for name in BESIDE if name in files)]
    storage = Path(constants.HF_HUB_CACHE).expanduser() / repo_folder_name(repo_id=repository, repo_type="model")
    missing = [name for name in wanted if not (storage / "snapshots" / str(info.sha) / name).exists()]
    for name in missing:
        if files[name].lfs is not None:
            _fetch(repository, str(info.sha), files[name], storage)
    folder = Path(snapshot_download(repository, revision=revision, allow_patterns=wanted, etag_timeout=TIMEOUT))
    for name in missing:
        if files[name].lfs is None and files[name].blob_id is not None:
            _check_small(folder / name, str(files[name].blob_id), repository)
    return folder


def _weights(names: Collection[str], repository: str) -> list[str]:
    """Return which files of a repository are its weights. Raises WeightsError if there are none, or several models."""
    return weight_files(names, repository, f"Download one, hf download {repository} FILE, and give its path.")


def _fetch(repository: str, commit: str, file: Any, storage: Path) -> None:
    """Download a large file into `storage`, the repository's folder in the cache; resume an earlier attempt."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    sha256, size = file.lfs.sha256, file.lfs.size
    if not re.fullmatch("[0-9a-f]{64}", sha256):  # it becomes the name of a file
        raise WeightsError(f"the hub gives no checksum for {file.rfilename} of {repository}, but {sha256!r}")
    whole = storage / "blobs" / sha256
    partial = whole.with_name(f"{sha256}.vitrail-incomplete")
    lock = storage.parent / ".locks" / storage.name / f"{sha256}.lock"  # the hub's own lock for this file
    for path in (whole, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if whole.exists():
            return
        with partial.open("ab") as stream:
            if stream.tell() > size:
                stream.truncate(0)
                stream.seek(0)
            begun = f", {stream.tell() / 2**20:.1f} MiB of it are here" if stream.tell() else ""
            log.info("downloading %s of %s, %.1f MiB%s", file.rfilename, repository, size / 2**20, begun)
            http_get(
                hf_hub_url(repository, file.rfilename, revision=commit),
                stream,
                resume_size=stream.tell(),
                headers=build_hf_headers(library_name="vitrail"),
                expected_size=size,
                displayed_filename=file.rfilename,
            )
        with partial.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != sha256:
            partial.unlink()
            raise _damaged(file.rfilename, repository, f"sha256 {found}", sha256)
        os.replace(partial, whole)


def _check_small(path: Path, expected: str, repository: str) -> None:
    """Compare a file with its git checksum; remove it from the cache if it differs."""
    content = path.read_bytes()
    found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if found != expected:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise _damaged(path.name, repository, f"git checksum {found}", expected)


def _damaged(name: str, repository: str, found: str, expected: str) -> WeightsError:
    return WeightsError(
        f"{name} of {repository} was damaged on the way: its {found} should be {expected}. It was "
        "thrown away: try again"
    )


def _cached(repository: str, revision: str, why: str) -> Path:
    """Return the snapshot in the cache without the network. Raises WeightsError if it is missing or incomplete."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(repository, revision=revision, local_files_only=True, allow_patterns=list(BESIDE))
        )
        _weights([path.name for path in folder.iterdir()], repository)
    except (LocalEntryNotFoundError, WeightsError, ValueError) as error:
        at, flag = ("", "") if revision == "main" else (f"@{revision}", f" --revision {revision}")
        raise WeightsError(
            f"{_not_here(f'{repository}{at}')} it is not in the cache "
            f"{constants.HF_HUB_CACHE} (HF_HOME says where that is), and {why}. If you mean weights of the hub, "
            f"run `hf download {repository}{flag} --local-dir {repository.partition('/')[2]}` on a machine with a "
            "network, copy its folder here, and give the path of the folder"
        ) from error
    log.info("%s comes from the cache: %s", repository, why)
    return folder


@contextmanager
def _bars() -> Iterator[None]:
    """Show the hub's progress bars on stderr within the block, unless only warnings are logged."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = not log.isEnabledFor(logging.INFO) and not are_progress_bars_disabled()
    if quiet:
        disable_progress_bars()
    try:
        yield
    finally:
        if quiet:
            enable_progress_bars()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__


def _is_local(error: BaseException) -> bool:
    """Return whether this machine's disk failed, rather than the network."""
    network = isinstance(error, ConnectionError | TimeoutError)
    return isinstance(error, OSError) and error.errno is not None and not network


def licence_beside(path: Path) -> str:
    """Return the `license` in the YAML header of README.md in the folder `path`, or beside the file `path`.

    "" if there is no such file, header or entry: a licence is never guessed.
    """
    folder = path if path.is_dir() else path.parent
    try:
        with open_regular(folder / "README.md") as stream:
            text = stream.read(LARGEST_HEADER).decode("utf-8", "ignore")
        header = yaml.safe_load(text.split("\n---", 1)[0].removeprefix("---")) if text.startswith("---\n") else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return ""
    licence = header.get("license") if isinstance(header, Mapping) else None
    return licence if isinstance(licence, str) else ""
