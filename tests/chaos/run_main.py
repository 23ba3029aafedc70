"""Runs train/main.py with the Hub at HF_ENDPOINT, which huggingface_hub would read when it is imported."""

import os
import runpy
import sys
from pathlib import Path

from huggingface_hub import constants

constants.ENDPOINT = os.environ["HF_ENDPOINT"]
constants.HF_HUB_OFFLINE = False
constants.HF_HUB_DISABLE_XET = True  # a different protocol from the Hub's API
sys.argv[0] = str(Path(__file__).resolve().parents[2] / "train" / "main.py")
runpy.run_path(sys.argv[0], run_name="__main__")
