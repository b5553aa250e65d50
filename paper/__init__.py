import sys

try:
    import matplotlib  # noqa: F401
    import scipy  # noqa: F401
except ImportError as e:
    sys.exit(f"error: the package {e.name} is missing: pip install -r paper/requirements.txt")
