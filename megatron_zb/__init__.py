"""Drop-in pipeline schedules for Megatron-LM: less bubble or less memory, same losses."""

from __future__ import annotations

__version__ = "0.1.0"
