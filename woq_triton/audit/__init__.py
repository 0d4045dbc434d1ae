"""What the kernels cost, without a GPU: compile them offline and count their machine instructions.

::

    instructions    one machine instruction, whichever chip
    sass, amdgcn    disassembly -> instructions
    mainloop        instructions -> the main loop, and what each instruction in it is for
    ttgir           Triton's IR -> weights an iteration, iterations unrolled
    chips           what bounds a kernel on which chip
    compilation     a launch on tensors without data -> a compiled, disassembled kernel
    record          all of these -> what is said of one compiled kernel
    problems        layers of models, sharded
    kernels         this package's kernels for them
    goals, report   what they must reach; table and JSON
"""
