// What the operators' host sides use of CANN's graph and tiling contexts and of its operator definitions: a stand-in
// for tests, by the public documentation.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ge {
using graphStatus = uint32_t;
constexpr graphStatus GRAPH_SUCCESS = 0, GRAPH_FAILED = 0xFFFFFFFF;
enum DataType { DT_FLOAT = 0, DT_FLOAT16 = 1, DT_INT32 = 3, DT_UINT8 = 4, DT_BF16 = 27 };
enum Format { FORMAT_ND = 2 };
}  // namespace ge

namespace gert {

class Shape {
public:
    Shape() = default;
    explicit Shape(std::vector<int64_t> sizes) : sizes_(std::move(sizes)) {}
    size_t GetDimNum() const { return sizes_.size(); }
    int64_t GetDim(size_t axis) const { return sizes_[axis]; }
    void SetDim(size_t axis, int64_t size) { sizes_[axis] = size; }
    int64_t GetShapeSize() const
    {
        int64_t count = 1;
        for (int64_t size : sizes_) count *= size;
        return count;
    }
    bool operator==(const Shape& other) const { return sizes_ == other.sizes_; }

private:
    std::vector<int64_t> sizes_;
};

struct StorageShape {
    Shape shape;
    const Shape& GetStorageShape() const { return shape; }
};

struct CompileTimeTensorDesc {
    ge::DataType type;
    ge::DataType GetDataType() const { return type; }
};

class TilingData {
public:
    void* GetData() { return bytes_; }
    size_t GetCapacity() const { return sizeof(bytes_); }
    void SetDataSize(size_t size) { size_ = size; }
    size_t GetDataSize() const { return size_; }

private:
    alignas(16) unsigned char bytes_[4096] = {};
    size_t size_ = 0;
};

// One call: the same object answers all three kinds of questions.
class Context {
public:
    std::vector<StorageShape> inputs;
    std::vector<CompileTimeTensorDesc> types;
    std::vector<Shape> outputs;
    std::vector<ge::DataType> outputTypes;
    TilingData tiling;
    size_t workspace = 0;
    uint32_t blocks = 0;
    uint64_t key = 0;
    bool allCoresAtOnce = false;
};

struct TilingContext : Context {
    const StorageShape* GetInputShape(size_t i) const { return &inputs.at(i); }
    const CompileTimeTensorDesc* GetInputDesc(size_t i) const { return &types.at(i); }
    TilingData* GetRawTilingData() { return &tiling; }
    size_t* GetWorkspaceSizes(size_t) { return &workspace; }
    const void* GetPlatformInfo() const { return this; }
    void SetBlockDim(uint32_t count) { blocks = count; }
    void SetTilingKey(uint64_t value) { key = value; }
    ge::graphStatus SetScheduleMode(uint32_t mode)
    {
        allCoresAtOnce = mode == 1;
        return ge::GRAPH_SUCCESS;
    }
};

struct InferShapeContext : Context {
    const Shape* GetInputShape(size_t i) const { return &inputs.at(i).shape; }
    Shape* GetOutputShape(size_t i) { return &outputs.at(i); }
};

struct InferDataTypeContext : Context {
    ge::DataType GetInputDataType(size_t i) const { return types.at(i).type; }
    ge::graphStatus SetOutputDataType(size_t i, ge::DataType type)
    {
        outputTypes.at(i) = type;
        return ge::GRAPH_SUCCESS;
    }
};

}  // namespace gert

namespace ops {

enum Option { REQUIRED };

struct OpParamDef {
    std::string name;
    std::vector<ge::DataType> types;
    bool contiguous = false;  // CANN copies a tensor that is not
    OpParamDef& ParamType(Option) { return *this; }
    OpParamDef& DataType(const std::vector<ge::DataType>& given)
    {
        types = given;
        return *this;
    }
    OpParamDef& Format(const std::vector<ge::Format>&) { return *this; }
    OpParamDef& UnknownShapeFormat(const std::vector<ge::Format>&) { return *this; }
    OpParamDef& AutoContiguous()
    {
        contiguous = true;
        return *this;
    }
};

struct OpAICoreConfig {
    OpAICoreConfig& DynamicCompileStaticFlag(bool) { return *this; }
    OpAICoreConfig& DynamicFormatFlag(bool) { return *this; }
    OpAICoreConfig& DynamicRankSupportFlag(bool) { return *this; }
    OpAICoreConfig& DynamicShapeSupportFlag(bool) { return *this; }
    OpAICoreConfig& NeedCheckSupportFlag(bool) { return *this; }
    OpAICoreConfig& PrecisionReduceFlag(bool) { return *this; }
};

struct OpAICoreDef {
    ge::graphStatus (*tile)(gert::TilingContext*) = nullptr;
    OpAICoreDef& SetTiling(ge::graphStatus (*function)(gert::TilingContext*))
    {
        tile = function;
        return *this;
    }
    void AddConfig(const char*, OpAICoreConfig&) {}
};

class OpDef {
public:
    explicit OpDef(const char* name) : name_(name) {}
    OpParamDef& Input(const char* name) { return Find(inputs, name); }
    OpParamDef& Output(const char* name) { return Find(outputs, name); }
    OpDef& SetInferShape(ge::graphStatus (*function)(gert::InferShapeContext*))
    {
        inferShape = function;
        return *this;
    }
    OpDef& SetInferDataType(ge::graphStatus (*function)(gert::InferDataTypeContext*))
    {
        inferType = function;
        return *this;
    }
    OpAICoreDef& AICore() { return core; }

    std::vector<OpParamDef> inputs, outputs;
    ge::graphStatus (*inferShape)(gert::InferShapeContext*) = nullptr;
    ge::graphStatus (*inferType)(gert::InferDataTypeContext*) = nullptr;
    OpAICoreDef core;

private:
    static OpParamDef& Find(std::vector<OpParamDef>& parameters, const char* name)
    {
        for (OpParamDef& parameter : parameters) {
            if (parameter.name == name) return parameter;
        }
        parameters.push_back({name, {}});
        return parameters.back();
    }
    std::string name_;
};

inline std::map<std::string, std::unique_ptr<OpDef>>& Registry()
{
    static std::map<std::string, std::unique_ptr<OpDef>> registry;
    return registry;
}

}  // namespace ops

#define OP_ADD(type) \
    static const bool type##Added [[maybe_unused]] = Registry().emplace(#type, std::make_unique<type>(#type)).second
