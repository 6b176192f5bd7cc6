"""The tutorials' second placement program: devices chosen by hand.

    python examples/devices/manual_devices.py [--device /gpu:1]

On a machine without that device it ends with an error that says what was asked for and what there is.
"""

import argparse

import torchquorum as tq

parser = argparse.ArgumentParser(description="a and b on the CPU, their sum elsewhere")
parser.add_argument("--device", default="/gpu:1", help="where to add (default: %(default)s)")
args = parser.parse_args()

with tq.tensorflow.log_device_placement():
    with tq.devices.device("/cpu:0"):
        a = tq.tensorflow.constant([1.0, 2.0, 3.0], shape=[3], name="a")
        b = tq.tensorflow.constant([1.0, 2.0, 3.0], shape=[3], name="b")
    with tq.devices.device(args.device):
        c = a + b
print(c.cpu().numpy())
