"""The names of huggingface_hub that it does not document and that vitrail needs, in one place.

They let a download use the cache folder and the lock of huggingface_hub itself, and resume a partial file.
`tests/weights/hub/test_hub.py` fails if a version no longer has them.
"""

from __future__ import annotations

from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock

__all__ = ["WeakFileLock", "http_get", "repo_folder_name"]
