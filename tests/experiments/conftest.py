"""Scripts of experiments/ are not a package: each runs by itself and imports the others from its folder."""

import sys

import runs

sys.path.insert(0, str(runs.ROOT / "experiments"))
