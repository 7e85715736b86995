"""Records a text-only checkpoint in a stock tree: stock_child.py FOLDER RESULT."""

from __future__ import annotations

import sys
from pathlib import Path

import checks
import rig_model
import text_record

if __name__ == "__main__":
    folder, result = sys.argv[1:]
    checks.write(result, text=text_record.record(rig_model.Rig(Path(folder))))
