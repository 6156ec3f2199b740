"""The images of a request: its body, or the files of a form. Paths and addresses are never accepted."""

from __future__ import annotations

from typing import NamedTuple

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from vitrail.server.limits import Limits, Refused

FORM = "multipart/form-data"
UNDECLARED = ("", "application/octet-stream")
"""Media types that say nothing about the content. The first bytes decide."""


class Upload(NamedTuple):
    """One uploaded file."""

    name: str
    """The client's name for it, which is only repeated in the response."""
    data: bytes
    refused: Refused | None = None
    """Why it is not read."""


async def read_uploads(request: Request, limits: Limits) -> list[Upload]:
    """Return the files of a request, in the order of the form.

    Raises Refused 415 for a body that is neither an image nor a form, 413 for too many files, 400 for a form that
    cannot be read or has no file, 499 if the client leaves.
    """
    content_type = request.headers.get("content-type", "")
    try:
        if _declared(content_type) == FORM:
            return await _form(request, limits)
        check_media_type(content_type, "the body")
        return [Upload("", await request.body())]
    except ClientDisconnect:
        raise disconnected() from None


def disconnected() -> Refused:
    """Return the refusal for a client that has left, which is only counted."""
    return Refused(499, "disconnected", "the client has left")


async def _form(request: Request, limits: Limits) -> list[Upload]:
    try:
        # one more than allowed, to distinguish too many files from a broken form
        form = await request.form(max_files=limits.images + 1, max_fields=limits.images)
    except (LookupError, UnicodeError) as error:  # the charset of a part is unknown, or no text is valid in it
        raise Refused(400, "form", f"the form cannot be read: {error}. Use UTF-8") from error
    except HTTPException as error:
        status, reason = (413, "too-many-images") if "Too many" in str(error.detail) else (400, "form")
        raise Refused(status, reason, f"the form cannot be read: {error.detail}") from error
    try:
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        if not files:
            raise Refused(400, "no-image", 'the form has no file; send one or more as "image"')
        if len(files) > limits.images:
            message = f"the request has {len(files)} images; the maximum is {limits.images}"
            raise Refused(413, "too-many-images", message)
        return [await _part(file) for file in files]
    finally:
        await form.close()


async def _part(file: UploadFile) -> Upload:
    name = file.filename or ""
    try:
        check_media_type(file.content_type or "", "the file")
    except Refused as refused:
        return Upload(name, b"", refused)
    return Upload(name, await file.read())


def check_media_type(content_type: str, what: str) -> None:
    """Raise Refused 415 if `content_type` declares something other than an image."""
    declared = _declared(content_type)
    if declared not in UNDECLARED and not declared.startswith("image/"):
        message = f"{what} has media type {declared!r}; send an image (image/jpeg, image/png, ...)"
        raise Refused(415, "media-type", message)


def _declared(content_type: str) -> str:
    """Return the media type without its parameters."""
    return content_type.partition(";")[0].strip().lower()
