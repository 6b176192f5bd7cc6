"""Reservations on Ray, in words."""

from torchquorum.launcher.ray_cluster import describe_resources


def test_resources_are_told_in_words():
    assert describe_resources({"CPU": 4.0, "GPU": 0.5, "memory": 1e9}) == "4 CPU, 0.5 GPU"
    assert describe_resources({}) == "no CPU"
