"""Checkpoints from one layout to the other: the release's safetensors, and Orbax with our stacked parameters.

    stacks      which tensors of the release fill which stack, and any region of a stack read from them
    requantise  back from bf16 or f32 weights to fp8 and fp4
    converted   a converted directory, read by the names of the release
    staging     a directory that is whole or not there: resumable, then committed by one rename
    convert     release -> Orbax        export  Orbax -> release        verify  any two compared
    budget      where every tensor goes, on which device, and whether it fits
    port_names  the names of the open port in transformers

Everything streams: memory is bounded by a few pieces of 64 MiB, whatever the size of a tensor or a stack.
"""
