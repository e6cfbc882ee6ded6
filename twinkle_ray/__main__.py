"""``python -m twinkle_ray``: see :mod:`twinkle_ray.cli`."""

from twinkle_ray.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
