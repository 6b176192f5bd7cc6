"""A reader that follows a run until it is over, and says how that went.

Arguments: address, `shared` or `messages`, seconds between versions.
"""

import json
import sys
import time

import torch

import torchquorum as tq

address, way, every_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
torch.set_num_threads(1)
print("ready", flush=True)
patience = tq.types.Patience(start_s=120.0, say_s=1000.0)
versions, changed, received, began = 0, 0, 0, 0.0
with tq.Reader(address, shared_memory=way == "shared", patience=patience) as reader:
    reader.pull()
    began, received = time.monotonic(), reader.received_bytes
    following = reader.follow(every_s=every_s)
    next(following)
    for change in following:
        versions += 1
        changed += sum(value.nbytes for value in change.variables.values())
    seconds = time.monotonic() - began
    ages = reader.freshness()
    came = reader.received_bytes - received
print(
    json.dumps(
        {
            "versions_per_s": versions / seconds,
            "age_p50_s": ages["age_p50_s"],
            "age_p99_s": ages["age_p99_s"],
            "bytes_of_changed": came / max(1, changed),
        }
    ),
    flush=True,
)
