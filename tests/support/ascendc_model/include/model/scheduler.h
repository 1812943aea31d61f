// Runs the cores of a launch as coroutines, one at a time and in a fixed order: a core runs until it ends or waits for
// another one.
#pragma once

#include <ucontext.h>

#include "core.h"

namespace ascendc_model {

class Scheduler {
public:
    // Runs body() on every core. The first refusal ends the run.
    Scheduler(Device& device, const std::function<void()>& body) : device_(device), body_(body)
    {
        device.yield = [this] {
            Task& task = *running_;
            swapcontext(&task.context, &main_);
        };
    }

    void Run()
    {
        for (const auto& core : device_.cores) {
            tasks_.push_back(std::make_unique<Task>());
            tasks_.back()->core = core.get();
        }
        for (bool progress = true; progress;) {
            progress = false;
            for (const auto& task : tasks_) {
                if (!task->ended && (!task->core->ready || task->core->ready())) {
                    Resume(*task);
                    progress = true;
                }
            }
        }
        for (const auto& task : tasks_) {
            if (!task->ended) {
                device_.current = task->core;
                Refuse(task->core->waitsFor, "waits for ever: the cores that should set it have ended or wait too");
            }
        }
    }

private:
    struct Task {
        Core* core = nullptr;
        ucontext_t context{};
        std::unique_ptr<char[]> stack;
        bool ended = false;
        std::exception_ptr error;
    };

    static constexpr size_t kStackBytes = 512 * 1024;

    void Resume(Task& task)
    {
        running_ = &task;
        device_.current = task.core;
        task.core->ready = nullptr;
        if (task.stack == nullptr) {
            task.stack.reset(new char[kStackBytes]);
            getcontext(&task.context);
            task.context.uc_stack.ss_sp = task.stack.get();
            task.context.uc_stack.ss_size = kStackBytes;
            task.context.uc_link = &main_;
            const auto self = reinterpret_cast<uintptr_t>(this);
            makecontext(&task.context, reinterpret_cast<void (*)()>(&Scheduler::Enter), 2, static_cast<unsigned>(self),
                static_cast<unsigned>(self >> 32));
        }
        swapcontext(&main_, &task.context);
        if (task.ended) {
            task.stack.reset();
        }
        if (task.error) {
            std::rethrow_exception(task.error);
        }
    }

    // makecontext passes integers only.
    static void Enter(unsigned low, unsigned high)
    {
        auto* self = reinterpret_cast<Scheduler*>(static_cast<uintptr_t>(high) << 32 | low);
        Task& task = *self->running_;
        try {
            self->body_();
        } catch (...) {
            task.error = std::current_exception();
        }
        task.ended = true;
    }

    Device& device_;
    const std::function<void()>& body_;
    ucontext_t main_{};
    std::vector<std::unique_ptr<Task>> tasks_;
    Task* running_ = nullptr;
};

}  // namespace ascendc_model
