"""The three operations CSA2 is made of, as doors: arrays and sizes in, arrays out.

    compress          m tokens -> one pool entry, carrying the half-filled group between calls
    index_select      index scores -> the K pool entries each query may read, optionally through candidate blocks
    sparse_attention  one softmax over a query's window and its selected pool entries, with a per-head sink

No configuration, no layer mode, no Flax here. Every door validates its arguments once and hands them to an implementation:
`implementation="xla"` names one (it works or raises), `None` takes the best the backend has.
"""

from kernels_pallas.compress import compress
from kernels_pallas.dispatch import Unsupported
from kernels_pallas.index_select import index_scores, index_select
from kernels_pallas.sparse_attention import sparse_attention

__all__ = ["Unsupported", "compress", "index_scores", "index_select", "sparse_attention"]
