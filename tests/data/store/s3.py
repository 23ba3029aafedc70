"""An S3 server on this machine."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import fsspec
import pytest


@contextmanager
def s3_bucket() -> Iterator[str]:
    """Start moto's S3 server with an empty bucket, where s3:// URLs of this process lead; yield its URL."""
    name = f"bucket-{secrets.token_hex(4)}"  # all servers of a process have the same buckets
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_MAX_ATTEMPTS": "1",  # the client would repeat what we repeat, with pauses
    }
    try:
        with patch.dict(os.environ, settings):
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            fsspec.filesystem("s3").mkdir(name)
            yield f"s3://{name}"
    finally:
        server.stop()
