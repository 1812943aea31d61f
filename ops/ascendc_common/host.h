// What the host sides of the operators share: CANN asks them for shapes and dtypes, and for how to launch a kernel.
// They refuse what is unsupported and print the reason to stderr. Most of it MindSpore has refused before, when it
// inferred shapes.
#pragma once

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "register/op_def_registry.h"
#include "tiling/platform/platform_ascendc.h"

#include "ascendc_common/plan.h"

namespace mindlora {

constexpr int64_t kMaxRank = 256;
// Sizes reach the kernels as 32-bit numbers.
constexpr int64_t kMaxSize = INT32_MAX;
// Of a row, in elements: the stride over it is a 32-bit number of bytes.
constexpr int64_t kMaxRow = UINT32_MAX / sizeof(float);

// Atlas A2 and Atlas A3 share one architecture, 2201.
constexpr const char* kSocs[] = {"ascend910b", "ascend910_93"};

// The dtypes of an input or output, one for each of the three builds of a kernel.
inline std::vector<ge::DataType> Elements() { return {ge::DT_FLOAT, ge::DT_FLOAT16, ge::DT_BF16}; }
inline std::vector<ge::DataType> Always(ge::DataType dtype) { return {dtype, dtype, dtype}; }

// Declares inputs, outputs and NPUs of an operator.
class Definition : public ops::OpDef {
public:
    explicit Definition(const char* name) : ops::OpDef(name) {}

protected:
    void In(const char* name, const std::vector<ge::DataType>& dtypes)
    {
        Declare(Input(name), dtypes).AutoContiguous();
    }
    // Written in place: an output of the same name follows. CANN's call then has one tensor for both, <name>Ref. Not
    // AutoContiguous, which would copy the whole of a tensor that is not, and back.
    void InOut(const char* name, const std::vector<ge::DataType>& dtypes) { Declare(Input(name), dtypes); }
    void Out(const char* name, const std::vector<ge::DataType>& dtypes) { Declare(Output(name), dtypes); }

    template <class InferShape, class InferDataType, class Tiling>
    void Functions(InferShape inferShape, InferDataType inferDataType, Tiling tiling)
    {
        SetInferShape(inferShape).SetInferDataType(inferDataType);
        AICore().SetTiling(tiling);
        for (const char* soc : kSocs) {
            ops::OpAICoreConfig config;
            config.DynamicCompileStaticFlag(true)
                .DynamicFormatFlag(false)
                .DynamicRankSupportFlag(true)
                .DynamicShapeSupportFlag(true)
                .NeedCheckSupportFlag(false)
                .PrecisionReduceFlag(false);
            AICore().AddConfig(soc, config);
        }
    }

private:
    static ops::OpParamDef& Declare(ops::OpParamDef& parameter, const std::vector<ge::DataType>& dtypes)
    {
        const std::vector<ge::Format> plain(dtypes.size(), ge::FORMAT_ND);
        return parameter.ParamType(ops::REQUIRED).DataType(dtypes).Format(plain).UnknownShapeFormat(plain);
    }
};

// Each output in turn has the shape of the next of the inputs I.
template <size_t... I>
ge::graphStatus ShapeOfInput(gert::InferShapeContext* context)
{
    size_t output = 0;
    const auto copy = [&](size_t input) {
        const gert::Shape* from = context->GetInputShape(input);
        gert::Shape* to = context->GetOutputShape(output++);
        if (from == nullptr || to == nullptr) return false;
        *to = *from;
        return true;
    };
    return (copy(I) && ...) ? ge::GRAPH_SUCCESS : ge::GRAPH_FAILED;
}

// Each output in turn has the dtype of the next of the inputs I.
template <size_t... I>
ge::graphStatus DataTypeOfInput(gert::InferDataTypeContext* context)
{
    size_t output = 0;
    const auto copy = [&](size_t input) {
        return context->SetOutputDataType(output++, context->GetInputDataType(input)) == ge::GRAPH_SUCCESS;
    };
    return (copy(I) && ...) ? ge::GRAPH_SUCCESS : ge::GRAPH_FAILED;
}

// The shapes of one call. The first mismatch is printed and makes Good() false.
class Shapes {
public:
    Shapes(const char* op, gert::TilingContext* context) : op_(op), context_(context) {}

    size_t Dimensions(size_t input) const
    {
        const gert::StorageShape* shape = context_->GetInputShape(input);
        return shape == nullptr ? 0 : shape->GetStorageShape().GetDimNum();
    }

    // Checks the number of dimensions of an input. Call it before At.
    void Check(size_t input, const char* name, size_t dimensions)
    {
        const size_t found = Dimensions(input);
        if (found != dimensions) {
            Refuse("%s has %zu dimensions: it must have %zu", name, found, dimensions);
            return;
        }
        for (size_t axis = 0; axis < dimensions; ++axis) {
            const int64_t size = Size(input, axis);
            if (size < 0 || size > kMaxSize) Refuse("%s has a size of %" PRId64, name, size);
        }
    }

    int64_t At(size_t input, size_t axis) const { return good_ ? Size(input, axis) : 0; }

    // One number, in a tensor of any shape.
    void CheckOneNumber(size_t input, const char* name)
    {
        const gert::StorageShape* shape = context_->GetInputShape(input);
        if (shape == nullptr || shape->GetStorageShape().GetShapeSize() != 1) Refuse("%s must be one number", name);
    }

    void CheckSame(const char* what, int64_t first, int64_t second)
    {
        if (first != second) {
            Refuse("%s is %" PRId64 " in one input and %" PRId64 " in another", what, first, second);
        }
    }

    void CheckRange(const char* what, int64_t size, int64_t least, int64_t most)
    {
        if (size < least || size > most) {
            Refuse("%s is %" PRId64 ": it must be %" PRId64 " to %" PRId64, what, size, least, most);
        }
    }

    // K and N have the same limits in all operators.
    void CheckSizes(int64_t in, int64_t out)
    {
        CheckRange("K", in, 1, kMaxRow);
        CheckRange("N", out, 1, kMaxRow);
    }

    // A [r, K] and B [N, r], with K and N as the other inputs have them.
    void CheckPair(size_t a, size_t b, int64_t in, int64_t out)
    {
        Check(a, "A", 2);
        Check(b, "B", 2);
        CheckSame("K", in, At(a, 1));
        CheckSame("N", out, At(b, 0));
        CheckSame("the rank", At(a, 0), At(b, 1));
        CheckSizes(in, out);
        CheckRange("rank", At(a, 0), 1, kMaxRank);
    }

    // pool [slots, max_rank, K + N], ranks [slots] and scales [slots].
    void CheckPool(size_t pool, size_t ranks, size_t scales)
    {
        Check(pool, "pool", 3);
        Check(ranks, "ranks", 1);
        Check(scales, "scales", 1);
        CheckSame("the number of slots", At(pool, 0), At(ranks, 0));
        CheckSame("the number of slots", At(pool, 0), At(scales, 0));
        CheckRange("max_rank", At(pool, 1), 1, kMaxRank);
    }

    bool Good() const { return good_; }

    // The first one counts.
    template <class... Parts>
    void Refuse(const char* format, Parts... parts)
    {
        if (!good_) return;
        good_ = false;
        std::fprintf(stderr, "mindlora %s (ascend): ", op_);
        std::fprintf(stderr, format, parts...);
        std::fprintf(stderr, ".\n");
    }

private:
    int64_t Size(size_t input, size_t axis) const
    {
        return context_->GetInputShape(input)->GetStorageShape().GetDim(axis);
    }

    const char* op_;
    gert::TilingContext* context_;
    bool good_ = true;
};

// The bytes of a number of an input, which has the operator's element type.
inline uint64_t ElementBytes(gert::TilingContext* context, size_t input)
{
    return context->GetInputDesc(input)->GetDataType() == ge::DT_FLOAT ? sizeof(float) : sizeof(uint16_t);
}

// The whole number in an environment variable, which must be within limits; `otherwise` if it is not set.
inline uint64_t Setting(Shapes& shapes, const char* variable, int64_t least, int64_t most, uint64_t otherwise)
{
    const char* text = std::getenv(variable);
    if (text == nullptr || *text == '\0') return otherwise;
    char* end = nullptr;
    const long read = std::strtol(text, &end, 10);
    const int64_t number = *end == '\0' ? read : least - 1;
    shapes.CheckRange(variable, number, least, most);
    return std::clamp(number, least, most);
}

// What was measured on an NPU: mindlora/ops/measured.py sets these variables.
inline void TakeMeasured(Shapes& shapes, Platform& platform)
{
    constexpr int64_t kMostDraw = 1000, kMostLaunch = 1000 * 1000;
    platform.drawTenths = Setting(shapes, "MINDLORA_ASCEND_DRAW", 10, kMostDraw, platform.drawTenths);
    platform.mixLaunch = Setting(shapes, "MINDLORA_ASCEND_MIX_LAUNCH", 0, kMostLaunch, platform.mixLaunch);
}

// For measurements: the number of AI cores, each a cube core with its two vector cores, and the kind that an operator
// for both kinds takes, where it can.
inline void Force(Shapes& shapes, Platform& platform)
{
    const int64_t most = std::max<int64_t>(PairedCubeCores(platform), 1);
    if (const uint64_t cores = Setting(shapes, "MINDLORA_ASCEND_CORES", 1, most, 0)) {
        platform.cubeCores = std::min<uint64_t>(platform.cubeCores, cores);
        platform.vectorCores = std::min<uint64_t>(platform.vectorCores, 2 * cores);
    }
    if (const char* kind = std::getenv("MINDLORA_ASCEND_KIND")) {
        const bool cube = std::strcmp(kind, "cube") == 0;
        if (!cube && std::strcmp(kind, "vector") != 0)
            shapes.Refuse("MINDLORA_ASCEND_KIND is %s: it must be cube or vector", kind);
        platform.cores = cube ? Cores::kCube : Cores::kVector;
    }
}

inline Platform AskPlatform(gert::TilingContext* context, Shapes& shapes)
{
    using platform_ascendc::CoreMemType;
    const platform_ascendc::PlatformAscendC chip(context->GetPlatformInfo());
    Platform platform{};
    platform.cubeCores = chip.GetCoreNumAic();
    platform.vectorCores = chip.GetCoreNumAiv();
    chip.GetCoreMemSize(CoreMemType::UB, platform.unifiedBuffer);
    chip.GetCoreMemSize(CoreMemType::L1, platform.l1);
    chip.GetCoreMemSize(CoreMemType::L0_A, platform.l0a);
    chip.GetCoreMemSize(CoreMemType::L0_B, platform.l0b);
    chip.GetCoreMemSize(CoreMemType::L0_C, platform.l0c);
    TakeMeasured(shapes, platform);
    Force(shapes, platform);
    return platform;
}

// Hands a plan to CANN.
template <class Tiling>
ge::graphStatus Launch(gert::TilingContext* context, const Plan<Tiling>& plan)
{
    static_assert(std::is_trivially_copyable<Tiling>::value, "a kernel reads its tiling byte by byte");
    constexpr uint32_t kBatchMode = 1;  // all cores start together: needed where cores wait for each other
    gert::TilingData* tiling = context->GetRawTilingData();
    size_t* workspaces = context->GetWorkspaceSizes(1);
    if (tiling == nullptr || workspaces == nullptr || tiling->GetCapacity() < sizeof(Tiling)) return ge::GRAPH_FAILED;
    std::memcpy(tiling->GetData(), &plan.tiling, sizeof(Tiling));
    tiling->SetDataSize(sizeof(Tiling));
    // The kernel's workspace follows the system's.
    const platform_ascendc::PlatformAscendC chip(context->GetPlatformInfo());
    workspaces[0] = plan.workspace + chip.GetLibApiWorkSpaceSize();
    context->SetBlockDim(plan.blocks);
    context->SetTilingKey(plan.tilingKey);
    return plan.kind == KernelKind::kVector ? ge::GRAPH_SUCCESS : context->SetScheduleMode(kBatchMode);
}

}  // namespace mindlora
