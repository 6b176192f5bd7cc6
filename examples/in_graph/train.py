"""In-graph training: this client holds program and data, the compute tasks only join.

On one machine, in four terminals:

H="--ps_hosts=localhost:2222 --worker_hosts=localhost:2223,localhost:2224"
torchquorum join --job_name=ps     --task_id=0 $H
torchquorum join --job_name=worker --task_id=0 $H
torchquorum join --job_name=worker --task_id=1 $H
python examples/in_graph/train.py $H
"""

import argparse

import torch
from torch import nn

import torchquorum as tq

parser = argparse.ArgumentParser()
parser.add_argument("--ps_hosts", default="localhost:2222")
parser.add_argument("--worker_hosts", default="localhost:2223,localhost:2224")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--logdir")
args = parser.parse_args()

torch.manual_seed(1)
data = tq.data.load_mnist()
batches = tq.Batches(data.train, 100, seed=1)
model = nn.Sequential(nn.Linear(784, 500), nn.ReLU(), nn.Dropout(0.2), nn.Linear(500, 10))
optimizer = tq.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), rule=tq.Sync())
graph = tq.graph.Graph(model, nn.functional.cross_entropy, example_inputs=next(batches))

cluster = {"ps": args.ps_hosts, "worker": args.worker_hosts}
with tq.graph.GraphSession(cluster, graph, optimizer, last_step=args.steps, logdir=args.logdir) as session:
    for result in session.run(batches):
        if result.number % 100 == 0:
            loss = "none" if result.loss is None else f"{result.loss:.3f}"
            print(f"batch {result.number}: loss {loss}, global step {result.step}, {result.placement}", flush=True)

model.eval()
x, y = data.test.tensors()
print(f"accuracy on {len(y)} test images: {(model(x).argmax(1) == y).float().mean():.4f}")
