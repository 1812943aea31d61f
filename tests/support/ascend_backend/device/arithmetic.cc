#include "arithmetic.h"

#include <unordered_map>

namespace {
// Made at first use: operators register before and after the variables of this file are made.
std::unordered_map<std::string, device::Compute>& Known()
{
    static auto* known = new std::unordered_map<std::string, device::Compute>;
    return *known;
}
}  // namespace

device::Operator::Operator(const char* name, Compute compute) { Known()[name] = std::move(compute); }

const device::Compute* device::ComputationOf(const std::string& name)
{
    const auto found = Known().find(name);
    return found == Known().end() ? nullptr : &found->second;
}

char* device::At(const aclTensor& tensor, const Index& index)
{
    const size_t skipped = index.size() - tensor.shape.size();
    int64_t element = 0;
    for (size_t axis = 0; axis < tensor.shape.size(); axis++) {
        if (tensor.shape[axis] != 1) element += index[skipped + axis] * tensor.strides[axis];
    }
    return static_cast<char*>(tensor.data) + element * static_cast<int64_t>(BytesOf(tensor.type));
}

double device::Get(const aclTensor& tensor, const Index& index) { return Read(At(tensor, index), tensor.type); }

void device::Put(const aclTensor& tensor, const Index& index, double value)
{
    Write(At(tensor, index), tensor.type, value);
}

double device::Get(const aclTensor& tensor, int64_t element)
{
    return Read(static_cast<char*>(tensor.data) + element * static_cast<int64_t>(BytesOf(tensor.type)), tensor.type);
}
