"""Networks as files for other programs, whatever the job: the part of an export that knows no boxes and no defects.

    module --traced--> ONNX model in memory --simplified, facts, shapes--> --Session--> compared by the job --> file

Everything happens in memory. A file appears under its name when it is whole and the job has compared it, or not at all.

Files:

    onnx_model  A torch module as an ONNX model in memory, and what is done to it before it becomes a file
    precision   Smaller ONNX models: half precision, or convolutions of 8 bits. They are as good as a measurement says
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.export.onnx_model import (
        Model,
        Session,
        check,
        is_there,
        need,
        quiet_tracing,
        refuse_missing,
        save,
        simplified,
        state_facts,
        state_shapes,
        traced,
        without_outputs,
    )
    from flatout.export.precision import (
        Precision,
        in_float16,
        in_float16_up_to_last_convolutions,
        in_int8,
        last_convolutions,
    )

__getattr__, __dir__ = face(__name__)
