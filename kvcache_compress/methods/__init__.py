"""Compression methods, one file or folder each. Importing this package imports every module, which registers them."""

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
