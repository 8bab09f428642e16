"""Export of networks to ONNX, OpenVINO and ncnn, independent of the job.

    module --traced--> ONNX model in memory --simplified, facts, shapes--> --Session--> compared by the job --> file

Everything happens in memory. A file appears under its name when it is complete and the job has compared it with the
network, or not at all.

Files:

    onnx_model  A torch module as an ONNX model: tracing, editing, saving, and running it in ONNX Runtime
    precision   Smaller ONNX models: half precision, or convolutions with 8 bits
    runtimes    Models for other runtimes than ONNX Runtime: OpenVINO and ncnn
    card        The model card beside exported files
    compared    A network with one output as ONNX and OpenVINO files, compared with it
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.export.card import CardFile, openvino_use, write_card
    from flatout.export.compared import ComparedModel, Exported
    from flatout.export.onnx_model import (
        Model,
        Session,
        check,
        is_installed,
        quiet_tracing,
        refuse_missing,
        require_package,
        save,
        set_metadata,
        set_output_shapes,
        simplified,
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
    from flatout.export.runtimes import TENSORRT_COMMAND, Ncnn, OpenVino, Run, save_parts

__getattr__, __dir__ = face(__name__)
