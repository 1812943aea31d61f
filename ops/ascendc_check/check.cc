// What all programs do, compiled once for them.
#include "check.h"

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "compare.h"

namespace mindlora {
namespace {

struct Options {
    std::vector<std::string> files;
    const char* config = nullptr;  // for aclInit
    int repeat = 1;
    int device = 0;
    int seconds = 60;  // for one call; a kernel whose cores wait for each other in vain ends here
};

// A function of CANN returned an error.
struct CallFailed : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// A kernel ended in an error or did not end: the device answers nothing after it.
struct KernelLost : CallFailed {
    using CallFailed::CallFailed;
};

template <class Error = CallFailed>
void Succeed(const std::string& call, int code)
{
    if (code == 0) return;
    const char* said = aclGetRecentErrMsg();
    std::string message = said == nullptr ? "" : said;
    message.erase(std::find(message.begin(), message.end(), '\n'), message.end());
    throw Error(call + " returned " + std::to_string(code) + (message.empty() ? "" : ": " + message));
}

// Memory of the device, freed with the object.
class DeviceMemory {
public:
    explicit DeviceMemory(size_t bytes) : bytes_(bytes)
    {
        if (bytes > 0) Succeed("aclrtMalloc", aclrtMalloc(&data_, bytes, ACL_MEM_MALLOC_HUGE_FIRST));
    }
    ~DeviceMemory()
    {
        if (data_ != nullptr) aclrtFree(data_);
    }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    void Write(const std::vector<char>& from)
    {
        Succeed("aclrtMemcpy", aclrtMemcpy(data_, bytes_, from.data(), from.size(), ACL_MEMCPY_HOST_TO_DEVICE));
    }
    std::vector<char> Read() const
    {
        std::vector<char> into(bytes_);
        Succeed("aclrtMemcpy", aclrtMemcpy(into.data(), bytes_, data_, bytes_, ACL_MEMCPY_DEVICE_TO_HOST));
        return into;
    }
    void* Address() const { return data_; }

private:
    void* data_ = nullptr;
    size_t bytes_;
};

// The tensors of a golden file on the device.
class Case {
public:
    Case(const Operator& op, const std::string& path) : op_(op), golden_(ReadGolden(path))
    {
        std::vector<std::string> names;
        for (const GoldenTensor& tensor : golden_) names.push_back(tensor.name);
        if (names != op.tensors) throw Unusable(path + " has not the tensors of " + op.name);
        for (const GoldenTensor& tensor : golden_) {
            memory_.push_back(std::make_unique<DeviceMemory>(tensor.before.size()));
            const uint64_t dimensions = tensor.shape.size();
            tensors_.push_back(aclCreateTensor(tensor.shape.data(), dimensions, tensor.type, nullptr, 0, ACL_FORMAT_ND,
                tensor.shape.data(), dimensions, memory_.back()->Address()));
        }
    }
    ~Case()
    {
        for (aclTensor* tensor : tensors_) aclDestroyTensor(tensor);
    }
    Case(const Case&) = delete;
    Case& operator=(const Case&) = delete;

    // Calls the operator once. Returns "", or the first thing that is wrong.
    std::string Run(aclrtStream stream, int seconds)
    {
        for (size_t i = 0; i < golden_.size(); ++i) memory_[i]->Write(golden_[i].before);
        Call(stream, seconds);
        std::vector<std::vector<char>> after;
        for (const auto& memory : memory_) after.push_back(memory->Read());
        std::string wrong;
        for (size_t i = 0; i < golden_.size() && wrong.empty(); ++i) wrong = Difference(golden_[i], after[i]);
        for (size_t i = 0; i < golden_.size() && wrong.empty() && !first_.empty(); ++i) {
            wrong = BitDifference(golden_[i], first_[i], after[i]);
        }
        if (first_.empty()) first_ = std::move(after);
        return wrong;
    }

private:
    void Call(aclrtStream stream, int seconds)
    {
        const std::string function = std::string("aclnn") + op_.name;
        uint64_t bytes = 0;
        aclOpExecutor* executor = nullptr;
        Succeed(function + "GetWorkspaceSize", op_.prepare(tensors_.data(), &bytes, &executor));
        workspace_ = std::make_unique<DeviceMemory>(bytes);
        Succeed(function, op_.launch(workspace_->Address(), bytes, executor, stream));
        const int milliseconds = seconds < 0 ? -1 : seconds * 1000;
        Succeed<KernelLost>(
            "aclrtSynchronizeStreamWithTimeout", aclrtSynchronizeStreamWithTimeout(stream, milliseconds));
    }

    const Operator& op_;
    std::vector<GoldenTensor> golden_;
    std::vector<std::unique_ptr<DeviceMemory>> memory_;
    std::unique_ptr<DeviceMemory> workspace_;
    std::vector<aclTensor*> tensors_;
    std::vector<std::vector<char>> first_;  // what the tensors held after the first round
};

int ReadNumber(const std::string& option, const char* value)
{
    char* end = nullptr;
    const long number = std::strtol(value, &end, 10);
    if (end == value || *end != 0) throw Unusable(option + " needs a whole number, not " + value);
    return static_cast<int>(number);
}

Options ReadOptions(int argc, char** argv)
{
    Options options;
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        if (word.rfind("--", 0) != 0) {
            options.files.push_back(word);
            continue;
        }
        if (i + 1 == argc) throw Unusable(word + " needs a value");
        const char* value = argv[++i];
        if (word == "--acl")
            options.config = value;
        else if (word == "--repeat")
            options.repeat = ReadNumber(word, value);
        else if (word == "--device")
            options.device = ReadNumber(word, value);
        else if (word == "--timeout")
            options.seconds = ReadNumber(word, value);
        else
            throw Unusable(word + " is not an option. They are --repeat N, --device N, --timeout SECONDS, --acl FILE");
    }
    if (options.files.empty()) throw Unusable("no golden files were named; golden.py writes them");
    if (options.repeat < 1) throw Unusable("--repeat must be 1 or more");
    return options;
}

// Prints the line of a file.
void Report(const std::string& title, int rounds, const Options& options, const std::string& wrong)
{
    std::string text = (wrong.empty() ? "PASS " : "FAIL ") + title;
    if (options.repeat > 1) text += (wrong.empty() ? " in each of " : " in round ") + std::to_string(rounds);
    if (options.repeat > 1 && wrong.empty()) text += " rounds";
    std::printf("%s\n", (wrong.empty() ? text : text + ": " + wrong).c_str());
    std::fflush(stdout);
}

// Runs one file. Returns whether it passed. Ends the program if the device is lost: to free its memory may hang too.
bool RunFile(const Operator& op, const Options& options, const std::string& path, aclrtStream stream)
{
    std::string title = path.substr(path.find_last_of('/') + 1), wrong;
    title = title.substr(0, title.rfind(".golden"));
    // So that the last line names the file if the program ends within it, or never does.
    std::printf("TRY  %s\n", title.c_str());
    std::fflush(stdout);
    std::unique_ptr<Case> one;
    int round = 0;
    try {
        one = std::make_unique<Case>(op, path);
        while (wrong.empty() && round < options.repeat) {
            ++round;
            wrong = one->Run(stream, options.seconds);
        }
    } catch (const KernelLost& error) {
        Report(title, round, options, error.what());
        std::fprintf(stderr, "error: the device is lost after %s: no further file was tried.\n", title.c_str());
        std::_Exit(1);
    } catch (const CallFailed& error) {
        wrong = error.what();
    }
    Report(title, round, options, wrong);
    return wrong.empty();
}

int RunFiles(const Operator& op, const Options& options)
{
    Succeed<Unusable>("aclInit", aclInit(options.config));
    Succeed<Unusable>("aclrtSetDevice", aclrtSetDevice(options.device));
    aclrtStream stream = nullptr;
    Succeed<Unusable>("aclrtCreateStream", aclrtCreateStream(&stream));
    const char* soc = aclrtGetSocName();
    std::printf("%s on device %d (%s)\n", op.name, options.device, soc == nullptr ? "unknown" : soc);
    size_t failed = 0;
    for (const std::string& path : options.files) failed += !RunFile(op, options, path, stream);
    aclrtDestroyStream(stream);
    aclrtResetDevice(options.device);
    aclFinalize();
    std::printf("%s: %zu cases, %zu failed\n", op.name, options.files.size(), failed);
    return failed == 0 ? 0 : 1;
}

}  // namespace

int Check(int argc, char** argv, const Operator& op)
{
    try {
        return RunFiles(op, ReadOptions(argc, argv));
    } catch (const std::exception& error) {
        std::fflush(stdout);
        std::fprintf(stderr, "error: %s.\n", error.what());
        return 2;
    }
}

}  // namespace mindlora
