"""The dimension key: one letter, one meaning, in suffixes, einsums and shape strings throughout the project.

    B batch            T query tokens in a call     W window slots            P pool entries
    K selected entries C candidate blocks           M tokens per pool entry   D model width
    R query rank       N heads                      H head width              I index heads
    J index width      G output groups              O output rank             F expert width
    X experts          V vocabulary                 S residual streams        L layers stacked for a scan

Letters outside the key (E new entries, Q draft targets, R kept rows, U a joined sequence, Y table rows of a token) are lengths
local to the function that uses them; its docstring says what they count. G also stacks pools, S also counts window rows.

A lower-case `p`, `t` or `k` in prose is one pool entry, one absolute token position, one selected entry.
Logical axis names (the strings below) are what sharding rules speak about; they name the same dimensions.
"""

from typing import Final

LOGICAL_AXES: Final[dict[str, str]] = {
    "B": "batch",
    "T": "tokens",
    "W": "window",
    "P": "pool",
    "K": "selected",
    "C": "candidate_blocks",
    "M": "entry_tokens",
    "D": "model",
    "R": "query_rank",
    "N": "heads",
    "H": "head_dim",
    "I": "index_heads",
    "J": "index_dim",
    "G": "output_groups",
    "O": "output_rank",
    "F": "expert_hidden",
    "X": "experts",
    "V": "vocab",
    "S": "streams",
    "L": "layers",
}
