"""The scripts of experiments/ are no package: each is run by itself, and imports the others as its neighbours."""

import sys

import runs

sys.path.insert(0, str(runs.ROOT / "experiments"))
