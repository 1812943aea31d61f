// An operator's two functions: the first makes an executor of its arguments, the second computes. Both are generated
// for each name (mindlora/dry_run finds the names) and hand over to these.
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>

#include "arithmetic.h"

namespace {

// How far up the caller's stack the places are that it wants filled.
constexpr uintptr_t kCallersStack = 1 << 18;

std::mutex messageLock;
std::string message;

std::string Text(const aclTensor& tensor)
{
    std::string text = std::to_string(tensor.type) + "[";
    for (size_t axis = 0; axis < tensor.shape.size(); axis++) {
        text += (axis == 0 ? "" : ",") + std::to_string(tensor.shape[axis]);
    }
    return text + "]";
}

}  // namespace

void device::Log(const std::string& name, bool computed, const std::vector<const aclTensor*>& tensors)
{
    static FILE* const file = [] {
        const char* path = std::getenv("STAND_IN_LAUNCHES");
        return path == nullptr ? nullptr : std::fopen(path, "a");
    }();
    if (file == nullptr) return;
    std::string line = name + (computed ? "\tcomputed\t" : "\tnothing computed\t");
    for (const aclTensor* tensor : tensors) line += Text(*tensor) + " ";
    static std::mutex lock;
    const std::lock_guard<std::mutex> guard(lock);
    std::fprintf(file, "%s\n", line.c_str());
    std::fflush(file);
}

extern "C" {

// The last two of an operator's arguments are places on the caller's stack, for the size of the workspace and for the
// executor; both hold 0. MindSpore takes an executor that is null for a failure.
long StandInAsked(
    const char* name, const uintptr_t* arguments, int most, const double* reals, int mostReals, void* frame)
{
    const auto stack = reinterpret_cast<uintptr_t>(frame);
    const auto isPlace = [&](uintptr_t argument) {
        return argument > stack && argument < stack + kCallersStack && argument % 8 == 0 &&
            *reinterpret_cast<uint64_t*>(argument) == 0;
    };
    for (int count = 0; count + 1 < most; count++) {
        if (!isPlace(arguments[count]) || !isPlace(arguments[count + 1])) continue;
        auto executor =
            new device::Executor{false, name, {arguments, arguments + count}, {reals, reals + mostReals}, {}};
        for (uintptr_t argument : executor->arguments) {
            const std::vector<aclTensor*> tensors = device::TensorsOf(argument);
            executor->tensors.insert(executor->tensors.end(), tensors.begin(), tensors.end());
        }
        *reinterpret_cast<device::Executor**>(arguments[count + 1]) = executor;
        return 0;
    }
    return 0;
}

long StandInLaunched(device::Executor* executor)
{
    if (executor == nullptr) return 0;
    const device::Compute* compute = device::ComputationOf(executor->name);
    bool computed = compute != nullptr;
    for (const aclTensor* tensor : executor->tensors) computed = computed && tensor->data != nullptr;
    if (computed) (*compute)(*executor);
    device::Log(executor->name, computed, {executor->tensors.begin(), executor->tensors.end()});
    if (!executor->repeatable) delete executor;
    return 0;
}

// MindSpore makes what it keeps repeatable, and launches it again with other addresses. The project's own operators
// have executors of their own, which begin with the same field.
int aclSetAclOpExecutorRepeatable(void* executor)
{
    if (executor != nullptr) *static_cast<bool*>(executor) = true;
    return 0;
}

// Each thread reads a copy, which stays until it asks again.
const char* aclGetRecentErrMsg()
{
    thread_local std::string copy;
    const std::lock_guard<std::mutex> guard(messageLock);
    copy = message.empty() ? "a stand-in for CANN has no message" : message;
    return copy.c_str();
}

}  // extern "C"

// What the project's operator package asks of the runtime: failures that a test wants, and where messages and launches
// go. MindSpore quotes the last message when a launch fails.
int StandInFailure(const char*) { return 0; }

void StandInMessage(const char* text)
{
    const std::lock_guard<std::mutex> guard(messageLock);
    message = text == nullptr ? "" : text;
}

void StandInRan(const char* opType, const std::vector<const aclTensor*>& tensors)
{
    device::Log(opType, true, tensors);
}
