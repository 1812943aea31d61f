#include "caller.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include "register/op_def_registry.h"
#include "tiling/platform/platform_ascendc.h"

namespace stand_in {
namespace {

struct Call : aclOpExecutor {
    stand_in::Kernel kernel;
    const ops::OpDef* definition;
    std::vector<const aclTensor*> tensors;
    gert::TilingContext context;
};

// As in tests/support/ascendc_model/include/model/python_entry.h.
struct Buffer {
    const char* name;
    void* data;
    uint64_t bytes;
    int32_t access;
};
using Run = uint64_t (*)(
    const char*, const Buffer*, uint32_t, const void*, uint64_t, uint32_t, int32_t, int32_t, uint64_t, char*, uint64_t);

constexpr int kInput = 0, kInOut = 1, kOutput = 2;
constexpr int kVectorAlone = 0;  // of the simulator's kernel types: its cores do not wait for each other

size_t BytesOf(aclDataType type) { return type == ACL_UINT8 ? 1 : type == ACL_FLOAT16 || type == ACL_BF16 ? 2 : 4; }

uint64_t SizeOf(const aclTensor& tensor)
{
    uint64_t bytes = BytesOf(tensor.type);
    for (int64_t size : tensor.shape) bytes *= static_cast<uint64_t>(size);
    return bytes;
}

// The tensors of the outputs: those of the inputs of the same names, then the rest of the arguments in turn.
std::vector<size_t> OutputsOf(const ops::OpDef& definition)
{
    std::vector<size_t> found;
    size_t next = definition.inputs.size();
    for (const auto& output : definition.outputs) {
        size_t i = 0;
        while (i < definition.inputs.size() && definition.inputs[i].name != output.name) ++i;
        found.push_back(i < definition.inputs.size() ? i : next++);
    }
    return found;
}

aclnnStatus Refuse(const char* reason)
{
    StandInMessage(reason);
    return 561000;
}

// Whether one of the definition's columns of dtypes fits all tensors.
bool TypesFit(const ops::OpDef& definition, const std::vector<const aclTensor*>& tensors)
{
    const std::vector<size_t> outputs = OutputsOf(definition);
    const auto fits = [&](const ops::OpParamDef& parameter, size_t tensor, size_t column) {
        return static_cast<int>(parameter.types[column]) == static_cast<int>(tensors[tensor]->type);
    };
    for (size_t column = 0; column < definition.inputs[0].types.size(); ++column) {
        bool all = true;
        for (size_t i = 0; i < definition.inputs.size(); ++i) all = all && fits(definition.inputs[i], i, column);
        for (size_t i = 0; i < outputs.size(); ++i) all = all && fits(definition.outputs[i], outputs[i], column);
        if (all) return true;
    }
    return false;
}

// Fills what a context knows of the inputs.
void Describe(gert::Context& context, const ops::OpDef& definition, const std::vector<const aclTensor*>& tensors)
{
    for (size_t i = 0; i < definition.inputs.size(); ++i) {
        context.inputs.push_back({gert::Shape(tensors[i]->shape)});
        context.types.push_back({static_cast<ge::DataType>(tensors[i]->type)});
    }
    context.outputs.resize(definition.outputs.size());
    context.outputTypes.resize(definition.outputs.size());
}

// Whether the operator infers shapes and dtypes of the outputs that it is given.
bool OutputsFit(const ops::OpDef& definition, const std::vector<const aclTensor*>& tensors)
{
    gert::InferShapeContext shapes;
    gert::InferDataTypeContext types;
    Describe(shapes, definition, tensors);
    Describe(types, definition, tensors);
    if (definition.inferShape(&shapes) != ge::GRAPH_SUCCESS || definition.inferType(&types) != ge::GRAPH_SUCCESS) {
        return false;
    }
    const std::vector<size_t> outputs = OutputsOf(definition);
    for (size_t i = 0; i < outputs.size(); ++i) {
        const aclTensor& given = *tensors[outputs[i]];
        if (!(shapes.outputs[i] == gert::Shape(given.shape))) return false;
        if (static_cast<int>(types.outputTypes[i]) != static_cast<int>(given.type)) return false;
    }
    return true;
}

// What is written in place must not be a copy; all else must be contiguous, since the kernels know no strides.
bool WrittenWhereItIs(const ops::OpDef& definition)
{
    const std::vector<size_t> outputs = OutputsOf(definition);
    for (size_t i = 0; i < definition.inputs.size(); ++i) {
        const bool written = std::find(outputs.begin(), outputs.end(), i) != outputs.end();
        if (definition.inputs[i].contiguous == written) return false;
    }
    return true;
}

int TypeOf(const Kernel& kernel, uint64_t key)
{
    return kernel.types.size() == 1 ? kernel.types[0] : kernel.types.at(key);
}

// The simulator's library for the dtype of the call; tests put them into a folder.
void* Library(const Kernel& kernel, aclDataType type)
{
    const char* dtype = type == ACL_FLOAT ? "float32" : type == ACL_FLOAT16 ? "float16" : "bfloat16";
    const std::string path =
        std::string(std::getenv("MINDLORA_STAND_IN_KERNELS")) + "/" + kernel.name + "_" + dtype + ".so";
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) StandInMessage(dlerror());
    return library;
}

// MINDLORA_STAND_IN_SKIP=N: the Nth launch does nothing.
bool Skipped()
{
    static int launches = 0;
    const char* wanted = std::getenv("MINDLORA_STAND_IN_SKIP");
    return wanted != nullptr && ++launches == std::atoi(wanted);
}

// MINDLORA_STAND_IN_HANG=N: the Nth launch never ends.
void Hang()
{
    static int launches = 0;
    const char* wanted = std::getenv("MINDLORA_STAND_IN_HANG");
    while (wanted != nullptr && launches + 1 == std::atoi(wanted)) pause();
    ++launches;
}

// MINDLORA_STAND_IN_SPOIL=N: the Nth launch leaves a wrong bit in the last byte of the last tensor; N:T of tensor T.
void Spoil(const std::vector<const aclTensor*>& tensors)
{
    static int launches = 0;
    const char* wanted = std::getenv("MINDLORA_STAND_IN_SPOIL");
    if (wanted == nullptr || ++launches != std::atoi(wanted)) return;
    const char* which = std::strchr(wanted, ':');
    const aclTensor& tensor = *tensors.at(which == nullptr ? tensors.size() - 1 : std::atoi(which + 1));
    static_cast<char*>(tensor.data)[SizeOf(tensor) - 1] ^= 0x40;
}

}  // namespace

aclnnStatus Prepare(
    const Kernel& kernel, const std::vector<const aclTensor*>& tensors, uint64_t* workspace, aclOpExecutor** executor)
{
    StandInMessage("");
    if (const int code = StandInFailure("GetWorkspaceSize")) return code;
    for (const aclTensor* tensor : tensors) {
        if (tensor == nullptr) return 161001;
    }
    const ops::OpDef& definition = *ops::Registry().at(kernel.opType);
    if (!TypesFit(definition, tensors)) return 161002;
    if (!OutputsFit(definition, tensors)) return 561001;
    if (!WrittenWhereItIs(definition)) {
        return Refuse("an input must be contiguous, and only one that is written in place must not be declared so");
    }
    auto made = std::make_unique<Call>();
    made->kernel = kernel;
    made->definition = &definition;
    made->tensors = tensors;
    Describe(made->context, definition, tensors);
    if (definition.core.tile(&made->context) != ge::GRAPH_SUCCESS) return 561002;
    if (TypeOf(kernel, made->context.key) != kVectorAlone && !made->context.allCoresAtOnce) {
        return Refuse("cores that wait for each other need batch mode, in which all start together");
    }
    *workspace = made->context.workspace;
    *executor = made.release();
    return 0;
}

aclnnStatus Launch(void* workspace, uint64_t bytes, aclOpExecutor* executor)
{
    // There is one device: launches of several threads follow each other.
    static std::mutex device;
    const std::lock_guard<std::mutex> lock(device);
    // A caller that may launch it again keeps it.
    auto* const call = static_cast<Call*>(executor);
    const std::unique_ptr<Call> last(call->repeatable ? nullptr : call);
    if (Skipped()) return 0;
    Hang();
    gert::TilingContext& context = call->context;
    const Kernel& kernel = call->kernel;
    std::vector<Buffer> buffers;
    aclDataType element = ACL_FLOAT;
    const auto add = [&](const std::string& name, size_t i, int access) {
        const aclTensor& tensor = *call->tensors[i];
        if (name == kernel.elementOf) element = tensor.type;
        buffers.push_back({name.c_str(), tensor.data, SizeOf(tensor), access});
    };
    const auto &inputs = call->definition->inputs, &outputs = call->definition->outputs;
    const std::vector<size_t> places = OutputsOf(*call->definition);
    // A kernel gets an output of an input's name a second time, and writes there.
    for (size_t i = 0; i < inputs.size(); ++i) add(inputs[i].name, i, kInput);
    for (size_t i = 0; i < outputs.size(); ++i) {
        add(outputs[i].name, places[i], places[i] < inputs.size() ? kInOut : kOutput);
    }
    // The kernel's part of the workspace, behind CANN's.
    if (bytes < platform_ascendc::kSystemWorkspace) return Refuse("the workspace has no room for CANN's own");
    std::vector<char> none(32);
    const uint64_t rest = bytes - platform_ascendc::kSystemWorkspace;
    char* const behind = static_cast<char*>(workspace) + platform_ascendc::kSystemWorkspace;
    buffers.push_back({"workspace", rest > 0 ? behind : none.data(), rest > 0 ? rest : none.size(), kOutput});
    void* library = Library(kernel, element);
    if (library == nullptr) return 561003;
    std::vector<char> report(1 << 22);
    reinterpret_cast<Run>(dlsym(library, "ascendc_model_run"))(kernel.name, buffers.data(),
        static_cast<uint32_t>(buffers.size()), context.tiling.GetData(), context.tiling.GetDataSize(), context.blocks,
        TypeOf(kernel, context.key), 1, context.key, report.data(), report.size());
    const std::string text = report.data();
    if (text.find("\"ok\": true") == std::string::npos) {
        StandInMessage(text.substr(0, 500).c_str());
        return 561000;
    }
    Spoil(call->tensors);
    StandInRan(kernel.opType, call->tensors);
    return 0;
}

}  // namespace stand_in
