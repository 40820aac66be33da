"""The operations CSA2 is made of, as doors: arrays and sizes in, arrays out.

    compress          m tokens -> one pool entry, carrying the half-filled group between calls
    index_select      index scores -> the K pool entries each query may read, optionally through candidate blocks
    sparse_attention  one softmax over a query's window and its selected pool entries, with a per-head sink
    attention_mass, index_divergence    what trains the indexer (plain XLA on every backend)

No configuration, no layer mode, no Flax here. Every door validates its arguments once and hands them to an implementation:
"xla" (exact reference, the CPU path), "pallas_tpu" or "pallas_gpu". `implementation=NAME` takes that one or raises, None takes
the best that is proven on the backend (`dispatch`). `interpret=True` runs a Pallas implementation on a CPU, for tests.
Number formats and packed storage are in `formats` and `storage`.
"""

from kernels_pallas import formats, storage
from kernels_pallas.compress import Compressed, compress, compress_entries, empty_half, waiting_rows
from kernels_pallas.dispatch import Unsupported
from kernels_pallas.index_loss import attention_mass, index_divergence
from kernels_pallas.index_select import index_scores, index_select
from kernels_pallas.sparse_attention import sparse_attention
from kernels_pallas.storage import Packed

__all__ = [
    "Compressed",
    "Packed",
    "Unsupported",
    "attention_mass",
    "compress",
    "compress_entries",
    "empty_half",
    "formats",
    "index_divergence",
    "index_scores",
    "index_select",
    "sparse_attention",
    "storage",
    "waiting_rows",
]
