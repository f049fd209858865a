"""Compression methods, a file or folder each: importing this package imports every module, which registers them all."""

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
