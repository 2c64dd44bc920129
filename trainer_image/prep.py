"""`finetune-prep` as a file, which is what spark-submit runs. The image has it at /opt/finetune/prep.py."""

from __future__ import annotations

import sys

from finetune_trainer.prep.__main__ import main

if __name__ == "__main__":
    sys.exit(main([]))
