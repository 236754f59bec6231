"""Mathematical rewriting of JAX programs: the same value for fewer resources."""

from importlib import metadata

try:
    __version__ = metadata.version("symjax_rewrite")
except metadata.PackageNotFoundError:  # a checkout on the path, installed nowhere
    __version__ = "0+uninstalled"
