"""A server on loopback that speaks S3, for tests of run folders on an object store."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def s3_server(bucket: str = "bucket") -> Iterator[dict[str, str]]:
    """Runs the server with one bucket; yields the variables that lead to it."""
    pytest.importorskip("s3fs", reason="needs s3fs (the extra s3)")
    server = pytest.importorskip("moto.server", reason="needs moto and flask")
    import boto3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    try:
        host, port = running.get_host_and_port()
        variables = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        client = boto3.client(
            "s3",
            endpoint_url=variables["AWS_ENDPOINT_URL"],
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=bucket)
        client.close()
        yield variables
    finally:
        running.stop()
        sys.modules["s3fs"].S3FileSystem.clear_instance_cache()  # the next server has another port
