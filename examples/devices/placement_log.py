"""The tutorials' first placement program: prints which device runs each operation.

python examples/devices/placement_log.py
"""

import torchquorum as tq

with tq.tensorflow.log_device_placement():
    a = tq.tensorflow.constant([1.0, 2.0, 3.0], shape=[3], name="a")
    b = tq.tensorflow.constant([1.0, 2.0, 3.0], shape=[3], name="b")
    c = a + b
print(c.numpy())
