"""LitServe with the same network, as its documentation shows: the peer of `benchmarks.serve`.

`python -m benchmarks.serve_litserve FOLDER PORT`.
"""

from __future__ import annotations

import sys
from typing import Any

import litserve
import numpy as np
import torch

from benchmarks.serve import BATCH
from vitrail.data.images.decode import decode
from vitrail.data.images.ops import eval_transform
from vitrail.evaluation.classify import predictor
from vitrail.weights.load import load


class Classifier(litserve.LitAPI):
    """Predicts the five best classes of an image. The object is pickled, and its methods run in a worker process."""

    def __init__(self, folder: str) -> None:
        super().__init__(max_batch_size=BATCH, batch_timeout=0.005)
        self.folder = folder

    def setup(self, device: str) -> None:
        """Load the network, in the worker."""
        network: Any = load(self.folder)
        self.transform, self.ask = eval_transform(network.card.preprocess), predictor(network, "cpu")

    def decode_request(self, request) -> np.ndarray:  # LitServe reads a form where no type is given
        """Return the image of a form as uint8 [H, W, 3]."""
        return self.transform(decode(request["image"].file.read()), np.random.default_rng(0))

    def batch(self, inputs: list[np.ndarray]) -> torch.Tensor:
        """Return images as one batch, uint8 [batch, 3, H, W]."""
        return torch.from_numpy(np.stack(inputs)).permute(0, 3, 1, 2)

    def predict(self, images: torch.Tensor) -> Any:
        """Return the highest probabilities and their classes."""
        return self.ask(images).softmax(1).topk(5)

    def unbatch(self, output: Any) -> list[Any]:
        """Return the probabilities and classes of each image."""
        return list(zip(output.values.tolist(), output.indices.tolist(), strict=True))

    def encode_response(self, output: Any) -> Any:
        """Return the JSON of one response."""
        return {"top": [{"class": str(c), "probability": p} for p, c in zip(*output, strict=True)]}


if __name__ == "__main__":
    server = litserve.LitServer(Classifier(sys.argv[1]), accelerator="cpu", timeout=120)
    server.run(port=int(sys.argv[2]), host="127.0.0.1", generate_client_file=False)
