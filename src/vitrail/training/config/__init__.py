"""The training configuration: options, presets and checks.

`Config` declares every option once; `OPTIONS` holds the declarations. To add an option, add a field to `Config`.
"""

from vitrail.training.config.config import OPTIONS, Config, default_text, fixed_options, options_table
from vitrail.training.config.options import read_value, read_yaml
from vitrail.training.config.presets import PRESETS

__all__ = ["OPTIONS", "PRESETS", "Config", "default_text", "fixed_options", "options_table", "read_value", "read_yaml"]
