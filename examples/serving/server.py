"""A server of click predictions beside a run that trains: its variables and rows are at most seconds old.

    python examples/serving/server.py localhost:2222 --port 8080       # ps task 0 of the run, or the run's folder
    curl 'localhost:8080/predict?user=7&item=21&item=22'

It holds no key that could push: `--secret-file` may be the read-only form (`torchquorum secret --read-only`).
"""

import argparse
import json
import threading
import time
from typing import Any

import torch
from clicks import Clicks
from werkzeug.exceptions import BadRequest, HTTPException, NotFound
from werkzeug.serving import run_simple
from werkzeug.wrappers import Request, Response

import torchquorum as tq

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", help="host:port of ps task 0, or the run's folder")
parser.add_argument("--port", type=int, default=8080)
parser.add_argument("--every", type=float, default=0.5, metavar="S", help="seconds between two versions")
parser.add_argument("--secret-file")


class Predictions:
    """The model that is served, and the thread that keeps it current."""

    def __init__(self, reader: tq.Reader, every_s: float) -> None:
        self.reader, self.every_s = reader, every_s
        self.model, self.lock = Clicks().eval(), threading.Lock()
        self.version = reader.pull(self.model)  # waits for the run; the tables ask the reader for rows from now on
        threading.Thread(target=self.follow, name="versions", daemon=True).start()

    def follow(self) -> None:
        while True:
            time.sleep(self.every_s)
            with self.lock:
                self.version = self.reader.pull(self.model)

    @torch.no_grad()
    def predict(self, user: int, items: list[int]) -> dict[str, Any]:
        with self.lock:  # variables and rows of one moment
            logits = self.model(torch.full((len(items),), user), torch.tensor(items))
            version = self.version
        clicks = dict(zip(map(str, items), torch.sigmoid(logits).tolist(), strict=True))
        return {"clicks": clicks, "version": int(version), **self.reader.freshness()}


def answer(predictions: Predictions, request: Request) -> Any:
    """Returns what a request is answered with."""
    if request.path == "/health":
        return {"version": int(predictions.version), "way": predictions.reader.way, **predictions.reader.freshness()}
    if request.path != "/predict":
        raise NotFound("ask for /predict?user=7&item=21 or /health")
    try:
        user, items = int(request.args["user"]), [int(item) for item in request.args.getlist("item")]
    except (KeyError, ValueError):
        raise BadRequest("user and item are whole numbers: /predict?user=7&item=21") from None
    if not items:
        raise BadRequest("which item? /predict?user=7&item=21")
    return predictions.predict(user, items)


def main() -> None:
    args = parser.parse_args()
    with tq.Reader(args.source, secret_file=args.secret_file, tables=True, name="server") as reader:
        predictions = Predictions(reader, args.every)
        print(f"serving version {int(predictions.version)} on http://localhost:{args.port}", flush=True)

        @Request.application
        def application(request: Request) -> Response:
            try:
                body = answer(predictions, request)
            except HTTPException as error:
                return Response(f"{error.description}\n", error.code)
            return Response(json.dumps(body), mimetype="application/json")

        run_simple("localhost", args.port, application, threaded=True)


if __name__ == "__main__":
    main()
