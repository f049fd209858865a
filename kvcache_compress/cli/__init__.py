"""Command line `kvcache-compress`: a file per command, which calls the library and prints what it returns.

Modules import torch and Transformers inside their commands, since these take seconds that `--help` can do without.
"""

from .main import app as app
