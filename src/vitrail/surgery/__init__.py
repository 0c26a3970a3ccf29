"""Surgery on existing models: merging, added tokens, test-time registers, ablation, recording.

Each change is checked before the model is touched, works in place, and returns a :class:`Handle` that removes it.
"""

from vitrail.runtime.trace import Trace
from vitrail.surgery._handle import Handle
from vitrail.surgery.ablation import Ablation, ablate
from vitrail.surgery.added_tokens import AddedTokens, add_tokens
from vitrail.surgery.counting import Count, count
from vitrail.surgery.hooks import Recording
from vitrail.surgery.merging import Merging, Payoff, load_method, look_ahead, merge
from vitrail.surgery.recording import record
from vitrail.surgery.registers import RegisterNeurons, TestTimeRegisters, find_register_neurons, test_time_registers
from vitrail.surgery.saving import from_pretrained, load

__all__ = [
    "Ablation",
    "AddedTokens",
    "Count",
    "Handle",
    "Merging",
    "Payoff",
    "Recording",
    "RegisterNeurons",
    "TestTimeRegisters",
    "Trace",
    "ablate",
    "add_tokens",
    "count",
    "find_register_neurons",
    "from_pretrained",
    "load",
    "load_method",
    "look_ahead",
    "merge",
    "record",
    "test_time_registers",
]
