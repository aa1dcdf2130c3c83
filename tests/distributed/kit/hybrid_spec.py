"""The layers of a `HybridModel` for ``--spec``, which reads a module's variables as they are."""

from __future__ import annotations

from kit.cpu_kernels import hybrid_spec

packed_hybrid_stack_spec = hybrid_spec()
