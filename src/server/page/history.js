"use strict";
// Conversations that this browser keeps. Each has a key of its own, so that saving one does not write the others; the
// list of all has their titles. When there are too many, the oldest go.

const listKey = "kvzap-conversations", conversationKey = id => "kvzap-conversation-" + id;
const mostConversations = 50;
// Browsers grant about 5 million.
const mostCharacters = 4e6;

class Conversations {
  /// `storage`: a Storage, or null where the browser allows none.
  constructor(storage) {
    this.storage = storage;
  }

  /// Entries {id, title, time, size}, the newest first.
  list() {
    const list = this.read(listKey);
    if (!Array.isArray(list)) return [];
    const entries = list.filter(one => one && typeof one.id === "string" && typeof one.title === "string");
    return entries.map(({id, title, time, size}) => ({id, title, time: Number(time) || 0, size: Number(size) || 0}))
      .sort((a, b) => b.time - a.time);
  }

  /// Returns {id, system, messages}, or null if it is gone or not a conversation.
  load(id) {
    const found = this.read(conversationKey(id));
    const isMessage = one => one && (one.role === "user" || one.role === "assistant") && typeof one.text === "string" &&
      ["thoughts", "document", "note", "end"].every(key => one[key] === undefined || typeof one[key] === "string");
    if (!found || !Array.isArray(found.messages) || !found.messages.every(isMessage)) return null;
    return {id, system: typeof found.system === "string" ? found.system : "", messages: found.messages};
  }

  /// Saves a conversation as the newest. Returns whether it has found room.
  save({id, system, messages}, title, time = Date.now()) {
    const text = JSON.stringify({system, messages}), others = this.list().filter(one => one.id !== id);
    if (!this.storage || text.length > mostCharacters) return false;
    let size = others.reduce((sum, one) => sum + one.size, text.length);
    const dropOldest = () => {
      const oldest = others.pop();
      size -= oldest.size;
      this.storage.removeItem(conversationKey(oldest.id));
    };
    try {
      while (others.length >= mostConversations || size > mostCharacters) dropOldest();
      for (;;) {
        try {
          this.storage.setItem(conversationKey(id), text);
          this.storage.setItem(listKey, JSON.stringify([{id, title, time, size: text.length}, ...others]));
          return true;
        } catch (caught) {
          if (others.length === 0) throw caught;
          dropOldest();
        }
      }
    } catch {
      this.remove(id);
      return false;
    }
  }

  remove(id) {
    const others = this.list().filter(one => one.id !== id);
    try {
      this.storage?.removeItem(conversationKey(id));
      this.storage?.setItem(listKey, JSON.stringify(others));
    } catch {
      // The storage is full or forbidden: there is nothing to remove.
    }
  }

  clear() {
    for (const {id} of this.list()) this.remove(id);
  }

  read(key) {
    try {
      return JSON.parse(this.storage?.getItem(key) ?? "null");
    } catch {
      return null;
    }
  }
}

if (typeof module !== "undefined") module.exports = {Conversations, mostCharacters, mostConversations};
