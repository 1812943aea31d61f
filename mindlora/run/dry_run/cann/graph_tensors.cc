// Strings, shapes and tensors of CANN's graph classes: they hold what they are told.
#include "graph_engine.h"

namespace ge {

AscendString::AscendString(const char* text)
{
    if (text != nullptr) this->text = std::make_shared<std::string>(text);
}

const char* AscendString::GetString() const { return text ? text->c_str() : ""; }

bool AscendString::operator<(const AscendString& other) const { return std::string(GetString()) < other.GetString(); }

Shape::Shape() : dims(std::make_shared<std::vector<int64_t>>()) {}
Shape::Shape(const std::vector<int64_t>& dims) : dims(std::make_shared<std::vector<int64_t>>(dims)) {}

int64_t Shape::GetDim(size_t axis) const { return axis < dims->size() ? (*dims)[axis] : 0; }
std::vector<int64_t> Shape::GetDims() const { return *dims; }
size_t Shape::GetDimNum() const { return dims->size(); }

int64_t Shape::GetShapeSize() const
{
    int64_t size = 1;
    for (int64_t dim : *dims) size *= dim;
    return size;
}

graphStatus Shape::SetDim(size_t axis, int64_t size)
{
    if (axis >= dims->size()) return kFailed;
    (*dims)[axis] = size;
    return kSuccess;
}

struct TensorDesc::Fields {
    Shape shape;
    Shape origin;
    Format format = FORMAT_ND;
    DataType type = DT_FLOAT;
};

TensorDesc::TensorDesc() : fields(std::make_shared<Fields>()) {}
TensorDesc::TensorDesc(Shape shape, Format format, DataType type)
    : fields(std::make_shared<Fields>(Fields{shape, Shape(), format, type}))
{}
TensorDesc::TensorDesc(const TensorDesc& other) : fields(std::make_shared<Fields>(*other.fields)) {}
TensorDesc::TensorDesc(TensorDesc&& other) : fields(other.fields) {}

DataType TensorDesc::GetDataType() const { return fields->type; }
Format TensorDesc::GetFormat() const { return fields->format; }
Shape TensorDesc::GetShape() const { return fields->shape; }
Shape TensorDesc::GetOriginShape() const { return fields->origin; }
void TensorDesc::SetDataType(DataType type) { fields->type = type; }
void TensorDesc::SetFormat(Format format) { fields->format = format; }
void TensorDesc::SetOriginFormat(Format) {}
void TensorDesc::SetOriginShape(const Shape& shape) { fields->origin = shape; }
void TensorDesc::SetRealDimCnt(int64_t) {}
void TensorDesc::SetShape(const Shape& shape) { fields->shape = shape; }
void TensorDesc::SetPlacement(Placement) {}

struct Tensor::Fields {
    TensorDesc description;
    std::vector<uint8_t> data;
};

Tensor::Tensor() : fields(std::make_shared<Fields>()) {}
Tensor::Tensor(const TensorDesc& description) : fields(std::make_shared<Fields>(Fields{description, {}})) {}
Tensor::Tensor(const TensorDesc& description, const uint8_t* data, size_t bytes) : Tensor(description)
{
    if (data != nullptr) fields->data.assign(data, data + bytes);
}

uint8_t* Tensor::GetData() { return fields->data.data(); }
size_t Tensor::GetSize() const { return fields->data.size(); }
TensorDesc Tensor::GetTensorDesc() const { return fields->description; }

TensorType::TensorType(const std::initializer_list<DataType>&) {}

}  // namespace ge
