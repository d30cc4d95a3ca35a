#!/usr/bin/env python3
"""Runs the package plot: the command kvzap-plot."""
import pathlib
import runpy

PACKAGE = "plot"  # from this file's folder; the installed command has another path here
runpy.run_path(str(pathlib.Path(__file__).resolve().parent / PACKAGE), run_name="__main__")
