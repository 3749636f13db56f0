"""Runs csrc/cuda on a CPU and looks at every access to memory: no GPU is needed to see what a kernel computes.

How: `transform.py` rewrites launches and shared memory as C++; `cuda_emulator.h` has the language's other words and
intrinsics; `emulator.cpp` runs the threads of a block as fibres of one thread. The kernels are compiled with
``-fsanitize=thread``, whose calls at each access the emulator answers itself.

Found: accesses out of bounds, misaligned or to freed memory, to memory of the host, to shared or global memory that was
never written; races in shared and in global memory; barriers and exchanges that not all threads reach, or not at the
same place; lanes that read from lanes which take no part; deadlocks; failed assertions; launches of impossible sizes or
without a device guard. Not shown: docs/limits.md.

`check_emulator.py` and `cases.cu`: planted mistakes must be found. `check_kernels.py`: every operator against its twin
and ATen. Both run in a process of their own (`session.py`, `control.py`), because the emulated kernels replace those
for CPU tensors. ``python -m tests.cuda_emulator --rounds 100 -k masks`` runs more of them.
"""
