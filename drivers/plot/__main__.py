"""Runs kvzap-plot, as `python3 drivers/plot`."""
import pathlib
import sys

sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)
from plot.command import main

sys.exit(main())
