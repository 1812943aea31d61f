// CANN's graph classes as far as MindSpore's kernel-by-kernel backend asks them: names, attributes and their defaults.
// The layouts are our own. MindSpore derives from ge::Operator and holds the others by value, so none is larger than
// CANN's: each is one shared pointer, as CANN's are.
#pragma once

#include <any>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ge {

using graphStatus = uint32_t;
constexpr graphStatus kSuccess = 0;
constexpr graphStatus kFailed = 1;

enum DataType : int { DT_FLOAT = 0 };
enum Format : int { FORMAT_ND = 2 };
enum Placement : int {};

struct AscendString {
    std::shared_ptr<std::string> text;

    AscendString() = default;
    AscendString(const char* text);
    const char* GetString() const;
    bool operator<(const AscendString& other) const;
};

struct Shape {
    std::shared_ptr<std::vector<int64_t>> dims;

    Shape();
    explicit Shape(const std::vector<int64_t>& dims);
    int64_t GetDim(size_t axis) const;
    std::vector<int64_t> GetDims() const;
    size_t GetDimNum() const;
    int64_t GetShapeSize() const;
    graphStatus SetDim(size_t axis, int64_t size);
};

struct TensorDesc {
    struct Fields;
    std::shared_ptr<Fields> fields;

    TensorDesc();
    TensorDesc(Shape shape, Format format, DataType type);
    TensorDesc(const TensorDesc& other);
    TensorDesc(TensorDesc&& other);
    DataType GetDataType() const;
    Format GetFormat() const;
    Shape GetShape() const;
    Shape GetOriginShape() const;
    void SetDataType(DataType type);
    void SetFormat(Format format);
    void SetOriginFormat(Format format);
    void SetOriginShape(const Shape& shape);
    void SetRealDimCnt(int64_t count);
    void SetShape(const Shape& shape);
    void SetPlacement(Placement placement);
};

struct Tensor {
    struct Fields;
    std::shared_ptr<Fields> fields;

    Tensor();
    explicit Tensor(const TensorDesc& description);
    Tensor(const TensorDesc& description, const uint8_t* data, size_t bytes);
    uint8_t* GetData();
    size_t GetSize() const;
    TensorDesc GetTensorDesc() const;
};

struct TensorType {
    std::shared_ptr<int> unused;

    TensorType(const std::initializer_list<DataType>& types);
};

// Each kind of attribute has three functions, which the linker knows by their exact parameters.
#define ATTRIBUTE(Type, Parameter)                            \
    void AttrRegister(const char* name, Parameter value);     \
    graphStatus GetAttr(const char* name, Type& value) const; \
    Operator& SetAttr(const char* name, Parameter value);

class Operator {
public:
    Operator() = default;
    explicit Operator(const std::string& type);
    explicit Operator(const char* type);
    Operator(const std::string& name, const std::string& type);
    Operator(const char* name, const char* type);
    Operator(const AscendString& name, const AscendString& type);
    virtual ~Operator() = default;

    std::string GetName() const;
    graphStatus GetName(AscendString& name) const;
    std::string GetOpType() const;
    graphStatus GetOpType(AscendString& type) const;

    ATTRIBUTE(bool, bool)
    ATTRIBUTE(float, float)
    ATTRIBUTE(int, int)
    ATTRIBUTE(int64_t, int64_t)
    ATTRIBUTE(DataType, const DataType&)
    ATTRIBUTE(AscendString, const AscendString&)
    ATTRIBUTE(Tensor, const Tensor&)
    ATTRIBUTE(std::vector<int>, const std::vector<int>&)
    ATTRIBUTE(std::vector<int64_t>, const std::vector<int64_t>&)
    ATTRIBUTE(std::vector<float>, const std::vector<float>&)
    ATTRIBUTE(std::vector<DataType>, const std::vector<DataType>&)
    ATTRIBUTE(std::vector<AscendString>, const std::vector<AscendString>&)
    ATTRIBUTE(std::vector<std::vector<int64_t>>, const std::vector<std::vector<int64_t>>&)
    graphStatus GetAttr(const std::string& name, std::string& value) const;
    graphStatus GetAttr(const std::string& name, std::vector<std::string>& value) const;

private:
    struct Fields;
    template <class Stored>
    graphStatus Get(const char* name, Stored& value) const;
    template <class Stored>
    void Set(const char* name, const Stored& value);

    std::shared_ptr<Fields> fields_;
};

#undef ATTRIBUTE

class OperatorCreatorRegister {
public:
    OperatorCreatorRegister(const char* type, const std::function<Operator(const AscendString&)>& create);
};

class OperatorFactory {
public:
    static Operator CreateOperator(const char* name, const char* type);
    static Operator CreateOperator(const std::string& name, const std::string& type);
    static bool IsExistOp(const char* type);
    static bool IsExistOp(const std::string& type);
};

}  // namespace ge
