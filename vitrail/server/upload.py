"""The images in a request: its body, or the files of a form. No path and no address is ever accepted."""

from __future__ import annotations

from typing import NamedTuple

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from vitrail.server.limits import Limits, Refused, check_media_type

FORM = "multipart/form-data"


class Upload(NamedTuple):
    """One file as it was sent."""

    name: str
    """As the client calls it; it is repeated in the answer and used for nothing else."""
    data: bytes
    refused: Refused | None = None
    """Why it is not looked at."""


async def read_uploads(request: Request, limits: Limits) -> list[Upload]:
    """Return the files of a request, those of a form in their order.

    Raises Refused 415 for a body that is neither an image nor a form, 413 for too many files, 400 for a form that
    cannot be read or holds no file, 499 where the client leaves.
    """
    content_type = request.headers.get("content-type", "")
    try:
        if content_type.partition(";")[0].strip().lower() == FORM:
            return await _form(request, limits)
        check_media_type(content_type, "the body")
        return [Upload("", await request.body())]
    except ClientDisconnect:
        raise left() from None


def left() -> Refused:
    """Return the refusal that nobody reads."""
    return Refused(499, "disconnected", "the client went away")


async def _form(request: Request, limits: Limits) -> list[Upload]:
    try:
        # one more than allowed is let through, to be told apart from a form that is torn
        form = await request.form(max_files=limits.images + 1, max_fields=limits.images)
    except HTTPException as error:
        status, reason = (413, "too-many-images") if "Too many" in str(error.detail) else (400, "form")
        raise Refused(status, reason, f"the form cannot be read: {error.detail}") from error
    try:
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        if not files:
            raise Refused(400, "no-image", 'the form holds no file: send one or more as "image"')
        if len(files) > limits.images:
            message = f"{len(files)} images in one request; {limits.images} is the most"
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
