"""TensorFlow's own ps runtime (compat.v1) on the recommender's work, async: one task of its cluster. Needs tensorflow, and no torch.

    python rows_tensorflow.py --job_name worker --task_index 0 --ps_hosts A --worker_hosts B,C --seconds 6

The chief prints the examples per second of the whole cluster, as it saw the global step move.
"""

import argparse
import itertools

import tensorflow.compat.v1 as tf
from family import Window
from rows_data import BATCH, DIM, FEATURES, IDS, NUMBERS, WARM_UP, batches


def layers(value: tf.Tensor, sizes: list[int], name: str) -> tf.Tensor:
    """Returns linear layers with ReLU between them."""
    glorot, zeros = tf.glorot_uniform_initializer(), tf.zeros_initializer()
    for k, (before, after) in enumerate(itertools.pairwise([int(value.shape[1]), *sizes])):
        weight = tf.get_variable(f"{name}/{k}/weight", [before, after], initializer=glorot)
        value = tf.matmul(value, weight) + tf.get_variable(f"{name}/{k}/bias", [after], initializer=zeros)
        value = tf.nn.relu(value) if k + 1 < len(sizes) else value
    return value


def network(numbers: tf.Tensor, ids: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the loss of the small DLRM."""
    begins = tf.random_uniform_initializer(-0.01, 0.01)
    tables = [tf.get_variable(f"table/{f}", [IDS, DIM], initializer=begins) for f in range(FEATURES)]
    rows = [tf.nn.embedding_lookup(table, ids[:, f]) for f, table in enumerate(tables)]
    dense = tf.nn.relu(layers(numbers, [64, DIM], "bottom"))
    every = tf.stack([dense, *rows], 1)
    dots = tf.reshape(tf.matmul(every, every, transpose_b=True), [BATCH, (FEATURES + 1) ** 2])
    pairs = [i * (FEATURES + 1) + j for i in range(FEATURES + 1) for j in range(i)]
    logits = layers(tf.concat([dense, tf.gather(dots, pairs, axis=1)], 1), [128, 1], "top")
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(logits=tf.squeeze(logits, 1), labels=labels))


def main() -> None:
    """Is a ps, or trains as a worker until the time is up."""
    tf.disable_v2_behavior()
    parser = argparse.ArgumentParser()
    for flag in ("--job_name", "--ps_hosts", "--worker_hosts"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--task_index", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    flags = parser.parse_args()
    me = f"/job:worker/task:{flags.task_index}"
    cluster = tf.train.ClusterSpec({"ps": flags.ps_hosts.split(","), "worker": flags.worker_hosts.split(",")})
    config = tf.ConfigProto(
        intra_op_parallelism_threads=1,
        inter_op_parallelism_threads=2,
        device_filters=["/job:ps", me] if flags.job_name == "worker" else [],
    )
    server = tf.train.Server(cluster, job_name=flags.job_name, task_index=flags.task_index, config=config)
    if flags.job_name == "ps":
        server.join()
    with tf.device(tf.train.replica_device_setter(worker_device=me, cluster=cluster)):
        given = [
            tf.placeholder(kind, shape)
            for kind, shape in ((tf.float32, [BATCH, NUMBERS]), (tf.int64, [BATCH, FEATURES]), (tf.float32, [BATCH]))
        ]
        global_step = tf.train.get_or_create_global_step()
        train = tf.train.AdagradOptimizer(0.02).minimize(network(*given), global_step=global_step)
    session = tf.train.MonitoredTrainingSession(master=server.target, is_chief=flags.task_index == 0, config=config)
    data, step, first, window = batches(flags.task_index), 0, 0, Window()
    while True:
        _, now = session.run([train, global_step], dict(zip(given, data[step % len(data)], strict=True)))
        step += 1
        if step == WARM_UP:
            first, window = now, Window()
        if step > WARM_UP and window.seconds > flags.seconds:
            break
    print(window.line(float(now - first) * BATCH), end="", flush=True)


if __name__ == "__main__":
    main()
