"""The tutorials' third placement program: what a device cannot do is done on the CPU, and said once.

python examples/devices/soft_placement.py [--device /gpu:0] [--no-soft]
"""

import argparse

import torchquorum as tq

parser = argparse.ArgumentParser(description="a sum on a GPU that may not be there")
parser.add_argument("--device", default="/gpu:0", help="where to add (default: %(default)s)")
parser.add_argument("--no-soft", action="store_true", help="without soft placement: an error names the operation")
args = parser.parse_args()

with tq.tensorflow.log_device_placement(), tq.tensorflow.allow_soft_placement(not args.no_soft):
    with tq.devices.device("/cpu:0"):
        a = tq.tensorflow.constant([1.0, 2.0, 3.0], shape=[3], name="a")
        b = tq.tensorflow.constant([1.0, 2.0, 3.0], shape=[3], name="b")
    with tq.devices.device(args.device):
        c = a + b
print(c.cpu().numpy())
