// CANN's tensors, scalars and arrays, as MindSpore makes them for an operator.
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "device.h"
#include "elements.h"

namespace {
std::mutex lock;
std::unordered_set<uintptr_t> alive;
std::unordered_map<uintptr_t, std::vector<aclTensor*>> lists;

using device::Buffer;
using device::Description;
}  // namespace

std::vector<aclTensor*> device::TensorsOf(uintptr_t argument)
{
    const std::lock_guard<std::mutex> guard(lock);
    if (alive.count(argument) != 0) return {reinterpret_cast<aclTensor*>(argument)};
    const auto list = lists.find(argument);
    return list == lists.end() ? std::vector<aclTensor*>{} : list->second;
}

extern "C" {

aclTensor* aclCreateTensor(const int64_t* shape, uint64_t axes, int type, const int64_t* strides, int64_t offset, int,
    const int64_t*, uint64_t, void* storage)
{
    auto tensor = new aclTensor{type, {shape, shape + axes}, nullptr, std::vector<int64_t>(axes), 0};
    tensor->offset = offset * static_cast<int64_t>(device::BytesOf(type));
    if (storage != nullptr) tensor->data = static_cast<char*>(storage) + tensor->offset;
    int64_t step = 1;
    for (uint64_t axis = axes; axis-- > 0;) {
        tensor->strides[axis] = strides == nullptr ? step : strides[axis];
        step *= shape[axis];
    }
    const std::lock_guard<std::mutex> guard(lock);
    alive.insert(reinterpret_cast<uintptr_t>(tensor));
    return tensor;
}

int aclDestroyTensor(const aclTensor* tensor)
{
    const std::lock_guard<std::mutex> guard(lock);
    alive.erase(reinterpret_cast<uintptr_t>(tensor));
    return 0;  // Executors that may be launched again still hold it.
}

int aclGetViewShape(const aclTensor* tensor, int64_t** shape, uint64_t* axes)
{
    *axes = tensor->shape.size();
    *shape = new int64_t[*axes];
    std::memcpy(*shape, tensor->shape.data(), *axes * sizeof(int64_t));
    return 0;
}

int aclSetTensorAddr(void*, size_t, aclTensor* tensor, void* storage)
{
    tensor->data = storage == nullptr ? nullptr : static_cast<char*>(storage) + tensor->offset;
    return 0;
}

void* aclCreateTensorList(aclTensor* const* tensors, uint64_t count)
{
    auto list = new device::Integers;  // An address of its own is all that it needs.
    const std::lock_guard<std::mutex> guard(lock);
    lists[reinterpret_cast<uintptr_t>(list)] = {tensors, tensors + count};
    return list;
}

// Nor does this free anything: executors that may be launched again hold the list.
int aclDestroyTensorList(const void*) { return 0; }

int aclSetDynamicTensorAddr(void* executor, size_t argument, size_t place, void* list, void* storage)
{
    return aclSetTensorAddr(
        executor, argument, device::TensorsOf(reinterpret_cast<uintptr_t>(list)).at(place), storage);
}

void* aclCreateScalar(void* value, int type) { return new device::Scalar{device::Read(value, type)}; }
int aclDestroyScalar(void*) { return 0; }
void* aclCreateIntArray(const int64_t* values, uint64_t count)
{
    return new device::Integers{{values, values + count}};
}
int aclDestroyIntArray(void*) { return 0; }
// Nothing that is computed here asks what these hold; they only must not be null.
void* aclCreateFloatArray(const float*, uint64_t) { return new device::Integers; }
void* aclCreateBoolArray(const bool*, uint64_t) { return new device::Integers; }
void* aclrtAllocatorCreateDesc() { return new device::Integers; }

void* aclCreateTensorDesc(int type, int axes, const int64_t* shape, int)
{
    return new Description{type, {shape, shape + axes}};
}

void aclDestroyTensorDesc(const void* description) { delete static_cast<const Description*>(description); }

size_t aclGetTensorDescNumDims(const void* description)
{
    return static_cast<const Description*>(description)->shape.size();
}

int aclGetTensorDescDimV2(const void* description, size_t axis, int64_t* size)
{
    *size = static_cast<const Description*>(description)->shape.at(axis);
    return 0;
}

int64_t aclGetTensorDescDim(const void* description, size_t axis)
{
    return static_cast<const Description*>(description)->shape.at(axis);
}

size_t aclGetTensorDescSize(const void* description)
{
    const auto* known = static_cast<const Description*>(description);
    size_t bytes = device::BytesOf(known->type);
    for (int64_t size : known->shape) bytes *= size;
    return bytes;
}

void* aclCreateDataBuffer(void* data, size_t bytes) { return new Buffer{data, bytes}; }
void* aclGetDataBufferAddr(const void* buffer) { return static_cast<const Buffer*>(buffer)->data; }

int aclDestroyDataBuffer(const void* buffer)
{
    delete static_cast<const Buffer*>(buffer);
    return 0;
}

void* aclopCreateAttr() { return new char; }
void aclopDestroyAttr(const void* attributes) { delete static_cast<const char*>(attributes); }
}
