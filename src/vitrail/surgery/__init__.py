"""Changes to existing models: checked before anything is touched, and all of them reversible."""

from vitrail.runtime.trace import Trace
from vitrail.surgery.ablation import Ablation, ablate
from vitrail.surgery.added_tokens import AddedTokens, add_tokens
from vitrail.surgery.counting import Count, count
from vitrail.surgery.merging import Merging, merge
from vitrail.surgery.recording import Recording, record
from vitrail.surgery.register_neurons import RegisterNeurons, find_register_neurons
from vitrail.surgery.registers import TestTimeRegisters, test_time_registers

__all__ = [
    "Ablation",
    "AddedTokens",
    "Count",
    "Merging",
    "Recording",
    "RegisterNeurons",
    "TestTimeRegisters",
    "Trace",
    "ablate",
    "add_tokens",
    "count",
    "find_register_neurons",
    "merge",
    "record",
    "test_time_registers",
]
