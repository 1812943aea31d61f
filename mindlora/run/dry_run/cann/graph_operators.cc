// Operators of CANN's graph: their names and attributes. The plugin registers defaults of attributes, which it then
// asks.
#include "graph_engine.h"

namespace ge {

struct Operator::Fields {
    std::string name;
    std::string type;
    std::map<std::string, std::any> attributes;
};

Operator::Operator(const char* name, const char* type) : fields_(std::make_shared<Fields>(Fields{name, type, {}})) {}
Operator::Operator(const char* type) : Operator("", type) {}
Operator::Operator(const std::string& type) : Operator("", type.c_str()) {}
Operator::Operator(const std::string& name, const std::string& type) : Operator(name.c_str(), type.c_str()) {}
Operator::Operator(const AscendString& name, const AscendString& type) : Operator(name.GetString(), type.GetString()) {}

std::string Operator::GetName() const { return fields_ ? fields_->name : ""; }
std::string Operator::GetOpType() const { return fields_ ? fields_->type : ""; }

graphStatus Operator::GetName(AscendString& name) const
{
    name = AscendString(GetName().c_str());
    return kSuccess;
}

graphStatus Operator::GetOpType(AscendString& type) const
{
    type = AscendString(GetOpType().c_str());
    return kSuccess;
}

template <class Stored>
graphStatus Operator::Get(const char* name, Stored& value) const
{
    if (!fields_) return kFailed;
    const auto found = fields_->attributes.find(name);
    const Stored* stored = found == fields_->attributes.end() ? nullptr : std::any_cast<Stored>(&found->second);
    if (stored == nullptr) return kFailed;
    value = *stored;
    return kSuccess;
}

template <class Stored>
void Operator::Set(const char* name, const Stored& value)
{
    if (fields_) fields_->attributes[name] = value;
}

#define ATTRIBUTE(Type, Parameter)                                                                  \
    void Operator::AttrRegister(const char* name, Parameter value) { Set<Type>(name, value); }      \
    graphStatus Operator::GetAttr(const char* name, Type& value) const { return Get(name, value); } \
    Operator& Operator::SetAttr(const char* name, Parameter value)                                  \
    {                                                                                               \
        Set<Type>(name, value);                                                                     \
        return *this;                                                                               \
    }

ATTRIBUTE(bool, bool)
ATTRIBUTE(float, float)
ATTRIBUTE(int64_t, int64_t)
ATTRIBUTE(DataType, const DataType&)
ATTRIBUTE(AscendString, const AscendString&)
ATTRIBUTE(Tensor, const Tensor&)
ATTRIBUTE(std::vector<int64_t>, const std::vector<int64_t>&)
ATTRIBUTE(std::vector<float>, const std::vector<float>&)
ATTRIBUTE(std::vector<DataType>, const std::vector<DataType>&)
ATTRIBUTE(std::vector<AscendString>, const std::vector<AscendString>&)
ATTRIBUTE(std::vector<std::vector<int64_t>>, const std::vector<std::vector<int64_t>>&)

#undef ATTRIBUTE

// Integers of 32 bits are asked of what was registered in 64, and the other way round.
void Operator::AttrRegister(const char* name, int value) { Set<int64_t>(name, value); }

graphStatus Operator::GetAttr(const char* name, int& value) const
{
    int64_t stored = 0;
    const graphStatus status = Get(name, stored);
    if (status == kSuccess) value = static_cast<int>(stored);
    return status;
}

Operator& Operator::SetAttr(const char* name, int value) { return SetAttr(name, static_cast<int64_t>(value)); }

void Operator::AttrRegister(const char* name, const std::vector<int>& value) { SetAttr(name, value); }

graphStatus Operator::GetAttr(const char* name, std::vector<int>& value) const
{
    std::vector<int64_t> stored;
    const graphStatus status = Get(name, stored);
    if (status == kSuccess) value.assign(stored.begin(), stored.end());
    return status;
}

Operator& Operator::SetAttr(const char* name, const std::vector<int>& value)
{
    return SetAttr(name, std::vector<int64_t>(value.begin(), value.end()));
}

graphStatus Operator::GetAttr(const std::string& name, std::string& value) const
{
    AscendString stored;
    const graphStatus status = Get(name.c_str(), stored);
    if (status == kSuccess) value = stored.GetString();
    return status;
}

graphStatus Operator::GetAttr(const std::string& name, std::vector<std::string>& value) const
{
    std::vector<AscendString> stored;
    const graphStatus status = Get(name.c_str(), stored);
    if (status != kSuccess) return status;
    value.clear();
    for (const AscendString& item : stored) value.push_back(item.GetString());
    return kSuccess;
}

namespace {
// The plugin registers creators while it is loaded, before and after this library's own variables are made.
std::map<std::string, std::function<Operator(const AscendString&)>>& Creators()
{
    static auto* creators = new std::map<std::string, std::function<Operator(const AscendString&)>>;
    return *creators;
}
}  // namespace

OperatorCreatorRegister::OperatorCreatorRegister(
    const char* type, const std::function<Operator(const AscendString&)>& create)
{
    Creators().emplace(type, create);
}

Operator OperatorFactory::CreateOperator(const char* name, const char* type)
{
    const auto found = Creators().find(type);
    // An operator that only CANN registers has no defaults here.
    return found == Creators().end() ? Operator(name, type) : found->second(AscendString(name));
}

Operator OperatorFactory::CreateOperator(const std::string& name, const std::string& type)
{
    return CreateOperator(name.c_str(), type.c_str());
}

bool OperatorFactory::IsExistOp(const char*) { return true; }
bool OperatorFactory::IsExistOp(const std::string&) { return true; }

}  // namespace ge
