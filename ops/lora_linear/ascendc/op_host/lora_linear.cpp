// lora_linear in CANN: its inputs and output, and how it is launched. Meaning: ../../README.md.
#include "ascendc_common/host.h"
#include "lora_linear_plan.h"

namespace {

enum { kX, kW, kA, kB, kScale, kBias };

ge::graphStatus OutputShape(gert::InferShapeContext* context)
{
    const gert::Shape *x = context->GetInputShape(kX), *w = context->GetInputShape(kW);
    gert::Shape* y = context->GetOutputShape(0);
    if (x == nullptr || w == nullptr || y == nullptr) return ge::GRAPH_FAILED;
    *y = *x;
    // Of an unknown rank, {-2}, there is nothing to set.
    if (y->GetDimNum() == 2) y->SetDim(1, w->GetDimNum() == 2 ? w->GetDim(0) : -1);
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus Tile(gert::TilingContext* context)
{
    mindlora::Shapes shapes("lora_linear", context);
    shapes.Check(kX, "x", 2);
    shapes.Check(kW, "W", 2);
    shapes.CheckOneNumber(kScale, "scale");
    const int64_t tokens = shapes.At(kX, 0), in = shapes.At(kX, 1), out = shapes.At(kW, 0);
    shapes.CheckSame("K", in, shapes.At(kW, 1));
    shapes.CheckPair(kA, kB, in, out);
    // MindSpore's ops.Custom cannot leave an input out: a matrix in its place means that there is no bias.
    const bool hasBias = shapes.Dimensions(kBias) == 1;
    shapes.Check(kBias, "bias", hasBias ? 1 : 2);
    if (hasBias) shapes.CheckSame("N", out, shapes.At(kBias, 0));
    const mindlora::Platform chip = mindlora::AskPlatform(context, shapes);
    if (!shapes.Good()) return ge::GRAPH_FAILED;
    return mindlora::Launch(context,
        mindlora::PlanLoraLinear(
            tokens, in, out, shapes.At(kA, 0), hasBias, mindlora::ElementBytes(context, kX), chip));
}

}  // namespace

namespace ops {

class LoraLinear : public mindlora::Definition {
public:
    explicit LoraLinear(const char* name) : Definition(name)
    {
        using namespace mindlora;
        In("x", Elements());
        In("w", Elements());
        In("a", Elements());
        In("b", Elements());
        In("scale", Always(ge::DT_FLOAT));
        In("bias", Elements());
        Out("y", Elements());
        Functions(OutputShape, DataTypeOfInput<kX>, Tile);
    }
};

OP_ADD(LoraLinear);

}  // namespace ops
