"""Serve a model over HTTP: ``vitrail serve``. Images of many requests share batches; load above the limits is refused.

The path of a request: `limits` admits it, `uploads` reads images from its body, `service` decodes them and waits for
the answers of the `batcher`, which runs the `model`; `app` has the routes, and `server` the process. Only `app` and
`server` need the extra ``serve``.
"""

from vitrail.errors import ServingError
from vitrail.serve.batcher import Batcher, Overloaded, Stopped
from vitrail.serve.limits import Limits
from vitrail.serve.model import Answer, ServedModel

__all__ = ["Answer", "Batcher", "Limits", "Overloaded", "ServedModel", "ServingError", "Stopped"]
