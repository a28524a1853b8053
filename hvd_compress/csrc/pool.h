// Large working memory that is kept for the next one who needs it: to get it anew from the system takes as long as to use it.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

namespace hvd_compress {

// Of T: default constructible, and empty again after clear().
template <class T>
class Pool {
 public:
  struct Return {
    void operator()(T* used) const {
      used->clear();
      const std::lock_guard lock(mutex());
      unused().push_back(used);
    }
  };
  using Handle = std::unique_ptr<T, Return>;

  // An empty one, which comes back by itself.
  static Handle take() {
    const std::lock_guard lock(mutex());
    if (unused().empty()) return Handle(new T);
    Handle taken(unused().back());
    unused().pop_back();
    return taken;
  }

 private:
  // Never destroyed: handles may outlive it.
  static std::mutex& mutex() {
    static auto* one = new std::mutex;
    return *one;
  }
  static std::vector<T*>& unused() {
    static auto* all = new std::vector<T*>;
    return *all;
  }
};

}  // namespace hvd_compress
