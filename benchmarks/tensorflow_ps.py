"""TensorFlow's own ps runtime (compat.v1) on the same work: one task of its cluster. Needs tensorflow, and no torch.

The chief prints the updates per second of the whole cluster as it saw the global step move; in sync mode each update counts
for as many batches as there are workers.
"""

import argparse
import gzip
import os
import sys
from pathlib import Path

import numpy as np
import tensorflow.compat.v1 as tf
from family import Window

FILES = Path(__file__).resolve().parent.parent / "src" / "torchquorum" / "data" / "files"
BATCH = 100


def load() -> tuple[np.ndarray, np.ndarray]:
    """Returns the same 55,000 images and labels that the other loops train on."""

    def raw(name: str, header_bytes: int) -> np.ndarray:
        return np.frombuffer(gzip.decompress((FILES / f"{name}.gz").read_bytes()), np.uint8, offset=header_bytes)

    images = raw("train-images-idx3-ubyte", 16).reshape(-1, 784)[5000:].astype(np.float32) / 255
    return images, raw("train-labels-idx1-ubyte", 8)[5000:].astype(np.int64)


def network(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """Returns the loss of the mlp 784-500-10 with L2 1e-4."""
    normal, zeros = tf.truncated_normal_initializer(stddev=0.1), tf.zeros_initializer()
    w1, b1 = tf.get_variable("w1", [784, 500], initializer=normal), tf.get_variable("b1", [500], initializer=zeros)
    w2, b2 = tf.get_variable("w2", [500, 10], initializer=normal), tf.get_variable("b2", [10], initializer=zeros)
    logits = tf.matmul(tf.nn.relu(tf.matmul(x, w1) + b1), w2) + b2
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=y))
    return loss + 1e-4 * (tf.nn.l2_loss(w1) + tf.nn.l2_loss(w2))


def main() -> None:
    """Is a ps, or trains as a worker until the time is up."""
    tf.disable_v2_behavior()
    parser = argparse.ArgumentParser()
    for flag in ("--job_name", "--ps_hosts", "--worker_hosts"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--task_index", type=int, required=True)
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--warm_up", type=int, required=True)
    flags = parser.parse_args()
    workers = flags.worker_hosts.split(",")
    me = f"/job:worker/task:{flags.task_index}"
    cluster = tf.train.ClusterSpec({"ps": flags.ps_hosts.split(","), "worker": workers})
    config = tf.ConfigProto(
        intra_op_parallelism_threads=1,
        inter_op_parallelism_threads=2,
        device_filters=["/job:ps", me] if flags.job_name == "worker" else [],
    )
    server = tf.train.Server(cluster, job_name=flags.job_name, task_index=flags.task_index, config=config)
    if flags.job_name == "ps":
        server.join()
    chief, hooks = flags.task_index == 0, []
    images, labels = load()
    with tf.device(tf.train.replica_device_setter(worker_device=me, cluster=cluster)):
        x, y = tf.placeholder(tf.float32, [None, 784]), tf.placeholder(tf.int64, [None])
        loss = network(x, y)
        global_step = tf.train.get_or_create_global_step()
        optimizer = tf.train.GradientDescentOptimizer(0.01)
        if flags.sync:
            optimizer = tf.train.SyncReplicasOptimizer(optimizer, len(workers), len(workers))
            hooks.append(optimizer.make_session_run_hook(chief))
        train = optimizer.minimize(loss, global_step=global_step)
    session = tf.train.MonitoredTrainingSession(master=server.target, is_chief=chief, hooks=hooks, config=config)
    rng = np.random.default_rng(flags.task_index)
    step, first, window = 0, 0, Window()
    while True:
        rows = rng.integers(0, len(images), BATCH)
        _, now = session.run([train, global_step], {x: images[rows], y: labels[rows]})
        step += 1
        if step == flags.warm_up:
            first, window = now, Window()
        if step > flags.warm_up and window.seconds > flags.seconds:
            break
    sys.stdout.write(window.line((now - first) * (len(workers) if flags.sync else 1)))
    sys.stdout.flush()
    os._exit(0)  # in sync mode the chief's own close would wait for two minutes


if __name__ == "__main__":
    main()
